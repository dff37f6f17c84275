"""Train a GPT on the sources of Python's standard library, in a tenth of the memory that its training state takes.

    python examples/train_gpt.py                      # the default model and budget
    python examples/train_gpt.py --memory 64MiB       # another budget
    python examples/train_gpt.py --compare            # train in plain PyTorch too, and compare byte for byte
    torchrun --nproc-per-node 2 examples/train_gpt.py # two ranks, each with batches of its own

Everything above ``main`` is plain PyTorch. One line in ``main``, ``mtcompile.compile``, adds the budget.
"""

import argparse
import hashlib
import math
import os
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import mtcompile

MIB = 2**20
VOCABULARY = 256  # a token is a byte
CORPUS_BYTES = 4 * MIB
STATE_PER_BUDGET = 10  # the default budget is the training state divided by this
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
        """Returns the mean cross-entropy of predicting ``targets``, the next token of each of ``tokens``; both (batch, seq)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


# ----------------------------------------------------------------------------------------------------------- the data


def corpus() -> Tensor:
    """Reads the sources of the standard library in the order of their paths, up to ``CORPUS_BYTES``."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages"} & set(path.parts):
            text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    return torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8)


def batches(data: Tensor, args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields ``args.steps`` pairs of random crops and the same crops shifted by one token. Seed and rank determine them."""
    generator = torch.Generator().manual_seed(args.seed + 1000 * args.rank)
    for _ in range(args.steps):
        starts = torch.randint(len(data) - args.seq, (args.batch,), generator=generator)
        crops = torch.stack([data[start : start + args.seq + 1] for start in starts.tolist()]).long().to(args.device)
        yield crops[:, :-1].contiguous(), crops[:, 1:].contiguous()


# ------------------------------------------------------------------------------------------------------- the training


def adamw(parameters: Iterable[Tensor], args: argparse.Namespace) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)


def adamw_at(homes: list[torch.device], model: nn.Module, args: argparse.Namespace) -> torch.optim.AdamW:
    """Updates each weight on the device where the compiled run did: a CPU and a GPU round the same update differently."""
    pairs = [(p, nn.Parameter(p.detach().to(home))) for p, home in zip(model.parameters(), homes)]
    opt = adamw([copy for _, copy in pairs], args)

    def send_gradients(*_: object) -> None:
        for p, copy in pairs:
            copy.grad = p.grad.to(copy.device)

    opt.register_step_pre_hook(send_gradients)
    opt.register_step_post_hook(lambda *_: [p.data.copy_(copy) for p, copy in pairs] and None)
    return opt


@dataclass
class Record:
    """Holds the losses as numbers and, for ``--compare``, a digest of the bytes of every loss, gradient and stepped weight."""

    curve: list[float] = field(default_factory=list)
    losses: list[bytes] = field(default_factory=list)
    gradients: list[bytes] = field(default_factory=list)
    weights: list[bytes] = field(default_factory=list)

    def recent_loss(self) -> float:
        """Averages the last 20 losses: the loss of one small batch says little."""
        return sum(self.curve[-20:]) / len(self.curve[-20:])


def digest(tensor: Tensor | None) -> bytes:
    if tensor is None:
        return b""
    return hashlib.sha1(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()).digest()


def train(title: str, model: nn.Module, opt: torch.optim.Optimizer, data: Tensor, args: argparse.Namespace) -> Record:
    """Runs the ordinary loop, the same for a plain and for a compiled model."""
    record = Record()
    torch.manual_seed(args.seed + args.rank)  # each rank draws its own dropout
    for step, (tokens, targets) in enumerate(batches(data, args), 1):
        started = time.perf_counter()
        for group in opt.param_groups:
            group["lr"] = args.lr * min(1.0, step / WARMUP_STEPS)

        loss = model(tokens, targets)
        loss.backward()
        opt.step()

        seconds = time.perf_counter() - started
        record.curve.append(loss.item())
        if args.compare:
            record.losses.append(digest(loss))
            record.gradients += [digest(parameter.grad) for parameter in model.parameters()]
            record.weights += [digest(parameter) for parameter in model.parameters()]
        model.zero_grad()

        if args.rank == 0 and (step == 1 or step % max(1, args.steps // 10) == 0):
            speed = args.ranks * tokens.numel() / seconds
            status = f"{title} step {step:>4}  loss {record.recent_loss():.3f}  {speed:,.0f} tok/s"
            if hasattr(model, "memory_report"):
                report = model.memory_report()
                status += f"  device {report['peak_device_bytes'] / MIB:.1f} host {report['peak_host_bytes'] / MIB:.0f} MiB"
            print(status, flush=True)
    return record


def report_comparison(plain: Record, compiled: Record) -> bool:
    """Prints how many losses, gradients and weights of two trainings are equal. Returns whether all of them are."""
    parts, same = [], True
    for name in ("losses", "gradients", "weights"):
        pairs = list(zip(getattr(plain, name), getattr(compiled, name), strict=True))
        equal = sum(a == b for a, b in pairs)
        parts.append(f"{name} {equal}/{len(pairs)} equal")
        same &= equal == len(pairs)
    print("compare: " + ", ".join(parts))
    return same


def join_ranks(args: argparse.Namespace) -> None:
    """Sets ``args.rank``, ``args.ranks`` and ``args.device``, and joins the ranks that torchrun started, if it did."""
    args.rank, args.ranks, args.device = 0, 1, "cuda" if torch.cuda.is_available() else "cpu"
    if dist.is_torchelastic_launched():
        args.device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
        dist.init_process_group("gloo")
        args.rank, args.ranks = dist.get_rank(), dist.get_world_size()


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a GPT inside a device-memory budget.")
    parser.add_argument("--memory", help=f"device budget such as 16MiB (default: training state / {STATE_PER_BUDGET})")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=2, help="sequences per step")
    parser.add_argument("--seq", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action="store_true", help="train in plain PyTorch too and compare the bytes")
    parser.add_argument("--timeline", default="timeline.html", help="where to write the timeline of a step that ran")
    args = parser.parse_args()
    join_ranks(args)
    if args.compare and args.ranks > 1:
        parser.error("--compare: expected one rank; a plain training of several is another program")
    if args.compare:  # on a GPU: sums in one order, for both runs
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(args.device == "cuda")

    def build() -> GPT:
        torch.manual_seed(args.seed)
        return GPT(args.layers, args.width, args.heads, args.seq, args.dropout)

    data = corpus()
    model = build()
    count = sum(parameter.numel() for parameter in model.parameters())
    state = 4 * 4 * count  # float32 weights, gradients and AdamW's two moments
    memory = args.memory or f"{max(1, state // STATE_PER_BUDGET // MIB)}MiB"
    if args.rank == 0:
        print(f"{count / 1e6:.1f} million parameters, training state {state / MIB:.0f} MiB, device budget {memory}")
        print("capturing and planning the first step ...", flush=True)
    opt = adamw(model.parameters(), args)
    timeline = args.timeline if args.rank == 0 else None
    try:
        model = mtcompile.compile(model, memory=memory, optimizer=opt, device=args.device, viz=timeline)
        compiled = train("compiled", model, opt, data, args)
    except mtcompile.BudgetError as error:
        print(f"{error}\nTry --memory {math.ceil(error.minimum_bytes / MIB)}MiB.")
        return 2

    same, verdict = True, ""
    if args.compare:
        reference = build().to(args.device)
        opt = adamw_at([p.device for p in model.parameters()], reference, args)
        same = report_comparison(train("plain   ", reference, opt, data, args), compiled)
        verdict = ", bit-identical to plain PyTorch" if same else ", NOT equal to plain PyTorch"
    if args.ranks > 1:
        dist.destroy_process_group()
    if args.rank:
        return 0
    report = model.memory_report()
    peak, budget, state = (report[f"{key}_bytes"] / MIB for key in ("peak_device", "budget_device", "state"))
    print(
        f"shown: loss {compiled.curve[0]:.2f} -> {compiled.recent_loss():.2f}{verdict}; peak device {peak:.1f} MiB "
        f"of budget {budget:.1f} MiB, training state {state:.1f} MiB ({state / budget:.1f}x the budget)"
    )
    python = os.path.relpath(sys.executable)
    print(f"next:  open {args.timeline} to see the step that ran, and plan yours: {python} -m mtcompile plan llama-8b")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
