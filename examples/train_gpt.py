"""Train a GPT on the Python standard library's own sources, inside a device-memory budget far below its training state.

    python examples/train_gpt.py                      # the default model and budget
    python examples/train_gpt.py --memory 64MiB       # another budget
    python examples/train_gpt.py --compare --steps 20 # the same steps in plain PyTorch, compared byte for byte

Everything up to ``main`` is plain PyTorch. What makes it a compiled training is one line, ``mtcompile.compile``.
"""

import argparse
import hashlib
import math
import os
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import mtcompile

MIB = 2**20
VOCABULARY = 256  # a token is a byte
CORPUS_BYTES = 4 * MIB
STATE_PER_BUDGET = 16  # the default budget is the training state divided by this
WARMUP_STEPS = 20

# ---------------------------------------------------------------------------------------------------------- the model


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = attended.transpose(1, 2).reshape(batch, seq, width)
        x = x + self.dropout(self.attention_out(attended))
        return x + self.dropout(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, seq: int, dropout: float) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(seq, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token_embedding.weight  # tied

        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                into_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if into_residual else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of (batch, seq) ``tokens`` against the tokens that follow them."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


# ----------------------------------------------------------------------------------------------------------- the data


def corpus() -> Tensor:
    """The first bytes of the standard library's sources, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages"} & set(path.parts):
            text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    return torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8)


def batches(data: Tensor, args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """``args.steps`` pairs of random crops and the same crops shifted by one; the same ones for the same seed."""
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        starts = torch.randint(len(data) - args.seq, (args.batch,), generator=generator)
        crops = torch.stack([data[start : start + args.seq + 1] for start in starts.tolist()]).long().to(args.device)
        yield crops[:, :-1].contiguous(), crops[:, 1:].contiguous()


# ------------------------------------------------------------------------------------------------------- the training


def adamw(parameters: Iterable[Tensor], args: argparse.Namespace) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)


def adamw_at(homes: list[torch.device], model: nn.Module, args: argparse.Namespace) -> torch.optim.AdamW:
    """Updates each weight where the compiled run did: a CPU and a GPU round the same update differently."""
    at_home = [(p, nn.Parameter(p.detach().to(home))) for p, home in zip(model.parameters(), homes)]
    opt = adamw([master for _, master in at_home], args)

    def fetch(*_: object) -> None:
        for p, master in at_home:
            master.grad = p.grad.to(master.device)

    opt.register_step_pre_hook(fetch)
    opt.register_step_post_hook(lambda *_: [p.data.copy_(master) for p, master in at_home] and None)
    return opt


@dataclass
class Record:
    """What ``--compare`` compares: a digest of the bytes of every loss, gradient and stepped weight."""

    losses: list[bytes] = field(default_factory=list)
    gradients: list[bytes] = field(default_factory=list)
    weights: list[bytes] = field(default_factory=list)


def digest(tensor: Tensor | None) -> bytes:
    if tensor is None:
        return b""
    return hashlib.sha1(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()).digest()


def train(
    title: str, model: nn.Module, opt: torch.optim.Optimizer, data: Tensor, args: argparse.Namespace, console: Console
) -> Record:
    """The ordinary loop, the same for a plain and for a compiled model."""
    record = Record()
    columns = (TextColumn("{task.description}"), BarColumn(6), MofNCompleteColumn(), TextColumn("{task.fields[now]}"))
    with Progress(*columns, TimeRemainingColumn(compact=True), console=console) as progress:
        losses: deque[float] = deque(maxlen=20)  # shown as their mean: one small batch says little
        task = progress.add_task(title, total=args.steps, now="first step")
        torch.manual_seed(args.seed)
        for step, (tokens, targets) in enumerate(batches(data, args), 1):
            started = time.perf_counter()
            for group in opt.param_groups:
                group["lr"] = args.lr * min(1.0, step / WARMUP_STEPS)

            loss = model(tokens, targets)
            loss.backward()
            opt.step()

            seconds = time.perf_counter() - started
            if args.compare:
                record.losses.append(digest(loss))
                record.gradients += [digest(parameter.grad) for parameter in model.parameters()]
                record.weights += [digest(parameter) for parameter in model.parameters()]
            model.zero_grad()

            losses.append(loss.item())
            now = f"loss {sum(losses) / len(losses):.3f}  {tokens.numel() / seconds:,.0f} tok/s"
            if hasattr(model, "memory_report"):
                peak = model.memory_report()
                now += f"  device {peak['peak_device_bytes'] / MIB:.1f} host {peak['peak_host_bytes'] / MIB:.0f} MiB"
            progress.update(task, advance=1, now=now)
            if step == 1 or step % max(1, args.steps // 10) == 0:
                progress.print(f"{title} step {step:>4}  {now}", highlight=False, soft_wrap=True)
    return record


def report_comparison(plain: Record, compiled: Record, console: Console) -> bool:
    """Print how much of two trainings is equal; whether all of it is."""
    parts, same = [], True
    for name in ("losses", "gradients", "weights"):
        expected, got = getattr(plain, name), getattr(compiled, name)
        equal = sum(a == b for a, b in zip(expected, got, strict=True))
        parts.append(f"{name} {equal}/{len(expected)} equal")
        same &= equal == len(expected)
    console.print("compare: " + ", ".join(parts), highlight=False, soft_wrap=True)
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a GPT inside a device-memory budget.")
    parser.add_argument("--memory", help=f"device budget such as 16MiB (default: training state / {STATE_PER_BUDGET})")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=4, help="sequences per step")
    parser.add_argument("--seq", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action="store_true", help="train in plain PyTorch too and compare the bytes")
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(args.compare, warn_only=True)  # on a GPU: sums in one order, for both runs
    console = Console()

    def build() -> GPT:
        torch.manual_seed(args.seed)
        return GPT(args.layers, args.width, args.heads, args.seq, args.dropout)

    data = corpus()
    model = build()
    count = sum(parameter.numel() for parameter in model.parameters())
    state = 4 * 4 * count  # float32 weights, gradients and AdamW's two moments
    memory = args.memory or f"{max(1, state // STATE_PER_BUDGET // MIB)}MiB"
    about = f"{count / 1e6:.1f} million parameters, training state {state / MIB:.0f} MiB, device budget {memory}"
    console.print(f"{about}, {len(data) / MIB:.1f} MiB of text", highlight=False, soft_wrap=True)
    opt = adamw(model.parameters(), args)
    try:
        model = mtcompile.compile(model, memory=memory, optimizer=opt, device=args.device)
        compiled = train("compiled", model, opt, data, args, console)
    except mtcompile.BudgetError as error:
        try_mib = math.ceil(error.minimum_bytes / MIB)
        console.print(f"{error}\nTry --memory {try_mib}MiB.", highlight=False, markup=False, soft_wrap=True)
        return 2

    same = True
    if args.compare:
        other = build().to(args.device)
        opt = adamw_at([p.device for p in model.parameters()], other, args)
        same = report_comparison(train("plain   ", other, opt, data, args, console), compiled, console)
    report = model.memory_report()
    peak, budget, state = (report[f"{key}_bytes"] for key in ("peak_device", "budget_device", "state"))
    print(f"peak device {peak / MIB:.1f} MiB of budget {budget / MIB:.1f} MiB, training state {state / MIB:.1f} MiB", end=" ")
    print(f"({state / budget:.1f}x the budget)")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
