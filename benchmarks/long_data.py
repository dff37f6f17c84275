"""What long texts and conversations take to become tokens: memory and time beside their size.

    python -m benchmarks.long_data --json out.json                  # minutes of a core
    python -m benchmarks.long_data --text 1000 --conversation 1     # MB; 1 GB of text takes a quarter of an hour

A text of the standard library's sources, in an order that is drawn, as one file; and one conversation of short messages, as a
line of JSON. Each is read and tokenized in a process of its own, by a byte-level tokenizer of 8,192 tokens that is trained on
some of these sources. ``peak``: all that the process holds, imports included; ``of which before``: before it reads.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.run import about

CHAT = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>\n' }}{% endfor %}"
SEQ = 2048


def tokenizer_in(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special, alphabet = ["<|end|>", "<|user|>", "<|assistant|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8192, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator((path.read_text() for path in sources()[:60]), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", extra_special_tokens=special[1:])
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)


def sources() -> list[Path]:
    """Returns the sources of Python's standard library that are UTF-8 text."""
    return sorted(path for path in Path(random.__file__).parent.glob("*.py") if path.read_bytes().isascii())


def write_text(path: Path, nbytes: int) -> None:
    texts, drawn, written = [source.read_bytes() for source in sources()], random.Random(0), 0
    with path.open("wb") as file:
        while written < nbytes:
            written += file.write(drawn.choice(texts)[: nbytes - written])


def write_conversation(path: Path, nbytes: int) -> None:
    drawn, messages, written = random.Random(0), [], 0
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "what", "there", "was"]
    while written < nbytes:
        for role in ("user", "assistant"):
            messages.append({"role": role, "content": " ".join(drawn.choices(words, k=5))})
            written += len(json.dumps(messages[-1]))
    path.write_text(json.dumps({"messages": messages}))


def measured(folder: Path, file: Path) -> dict[str, Any]:
    """Reads a file into tokens in this process."""
    from mtcompile.data.encoding import encode, load_tokenizer
    from mtcompile.data.records import read_records

    tokenizer = load_tokenizer(folder)
    tokenizer("warm")
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    samples = encode(read_records([file]), tokenizer, SEQ, "cut")
    took, peak = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row = {"nbytes": file.stat().st_size, "tokens": len(samples.tokens), "cpu_s": round(took, 2)}
    return {**row, "peak_mib": peak >> 10, "of which before_mib": before >> 10}


def in_child(folder: Path, file: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.long_data", "--one", str(folder), str(file)]
    return dict(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=float, nargs="*", default=[25, 50, 100], help="MB of each text")
    parser.add_argument("--conversation", type=float, nargs="*", default=[0.25, 0.5, 1, 2, 4], help="MB of each conversation")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--one", type=Path, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(*args.one)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer_in(folder / "tokenizer")
        for kind, sizes, write in (
            ("conversation", args.conversation, write_conversation),
            ("text", args.text, write_text),
        ):
            for megabytes in sizes:
                file = folder / ("data.txt" if kind == "text" else "data.jsonl")
                write(file, int(megabytes * 1e6))
                rows.append({"kind": kind, **in_child(folder / "tokenizer", file)})
                print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"about": about(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
