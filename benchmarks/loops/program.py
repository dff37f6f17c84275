"""A drawn program: what it consists of, and its source text."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from string import Template
from typing import Any

from benchmarks.loops.events import EVENTS, READY, SETUP
from benchmarks.loops.modules import FORMS, LAYERS, Form

OPTIMIZERS = {
    "sgd": "torch.optim.SGD(model.parameters(), lr=0.1)",
    "momentum": "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "adamw": "torch.optim.AdamW(model.parameters(), lr=1e-2)",
    "amsgrad": "torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True, foreach=True)",
    "rmsprop": "torch.optim.RMSprop(model.parameters(), lr=1e-2, centered=True)",
    "adagrad": "torch.optim.Adagrad(model.parameters(), lr=1e-2)",
    "groups": "torch.optim.AdamW([{'params': list(model.head.parameters()), 'lr': 0.1, 'weight_decay': 0.0},\n"
    "    {'params': [p for p in model.parameters() if all(p is not q for q in model.head.parameters())]}], lr=1e-2)",
}
LARGE = "64MiB"
_BINDINGS = {
    "compile": "model = mtcompile.compile(model, optimizer=optimizer, **options)",
    "bind": "model = mtcompile.compile(model, **options).bind(optimizer)",
    "none": "model = mtcompile.compile(model, **options)",
}


@dataclass(frozen=True, slots=True)
class Event:
    """``place``: where in a step it is, or the event of the plain loop that it stands for; ``step``: its number, -1 before the
    first; ``names``: the parameters and modules that it is about."""

    kind: str
    place: str
    step: int = -1
    names: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """One training program.

    layers     (kind, number) of each
    tokens     batches are tokens, else rows of numbers; ``tied``: the head has the embedding's weights
    memory     a budget, or "least" or "middle"
    late       it is compiled after the first step
    binding    how the compiled model gets its optimizer: "compile", "bind" or "none"
    checked    it runs under MT_CHECK=1, which delays at random what runs at once
    """

    layers: tuple[tuple[str, int], ...]
    tokens: bool
    tied: bool
    form: str
    optimizer: str
    options: tuple[tuple[str, Any], ...]
    memory: str | int
    events: tuple[Event, ...]
    late: bool = False
    binding: str = "compile"
    checked: bool = False

    @property
    def reference(self) -> dict[str, Any] | None:
        """The options that it is compared with; None: plain PyTorch. Micro-batches add up gradients in an order of their own,
        which is that of any budget."""
        options = dict(self.options)
        if "accumulate" not in options:
            return None
        kept = {name: value for name, value in options.items() if name not in ("run_ahead", "fragments", "embeddings")}
        return {**kept, "memory": LARGE, "policy": "resident"}


def source(program: Program, marks: bool = False) -> str:
    """Returns a module with the program as the function ``program(options, see, at)``. ``marks``: it calls ``at`` with the
    number of each statement before that runs."""
    kinds = [LAYERS[kind] for kind, _ in program.layers]
    helpers = "\n\n".join(dict.fromkeys(kind.helper.strip() for kind in kinds if kind.helper))
    body = _lines(program)
    if marks:
        body = _marked(body)
    return "\n".join(
        [
            "import copy",
            "",
            "import torch",
            "import torch.nn.functional as F",
            "from torch import nn",
            "from torch.utils.checkpoint import checkpoint",
            "",
            "import mtcompile",
            "",
            *(["", helpers, ""] if helpers else []),
            "",
            _model(program),
            "",
            "def program(options, see, at=None):",
            "    compiled = options is not None",
            *(textwrap.indent(line, "    ") for line in body),
            "",
        ]
    )


def _model(program: Program) -> str:
    width = 11 if program.tokens else 4
    init, forward = [], []
    if program.tokens:
        init.append("self.embed = nn.Embedding(11, 8)")
        forward.append("h = self.embed(x).flatten(0, 1)")
    else:
        forward.append("h = x")
    for kind, number in program.layers:
        layer = LAYERS[kind]
        init.append(Template(layer.init).substitute(i=number))
        forward.append(Template(layer.forward).substitute(i=number))
    init.append(f"self.head = nn.Linear(8, {width}{', bias=False' if program.tied else ''})")
    if program.tied:
        init.append("self.head.weight = self.embed.weight")
    returned = Template(FORMS[program.form].returned).substitute(loss=_loss(program))
    forward += ["out = self.head(h)", f"return {returned}"]
    lines = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += [textwrap.indent(line, " " * 8) for line in init if line]
    lines += ["", "    def forward(self, x):", *(textwrap.indent(line, " " * 8) for line in forward), ""]
    return "\n".join(lines)


def _loss(program: Program, out: str = "out", x: str = "x") -> str:
    return f"F.cross_entropy({out}, {x}.flatten())" if program.tokens else f"{out}.square().mean()"


def _lines(program: Program) -> list[str]:
    """The loop, a statement of one or more lines each."""
    form = FORMS[program.form]
    values = _values(program, form)
    setups: list[str] = []
    before: list[str] = []
    rest: list[str] = []
    for event in program.events:
        kind = EVENTS[event.kind]
        setups.append(Template(kind.setup).substitute(values))
        is_before = event.place == SETUP or (program.late and event.step == 0)
        (before if is_before else rest).append(Template(kind.text).substitute(values | dict(event.names)))
    texts = [
        "torch.manual_seed(0)",
        "model = Model()",
        f"optimizer = {OPTIMIZERS[program.optimizer]}",
        *dict.fromkeys(setups),
        *before,
        f"if compiled:\n    {_BINDINGS[program.binding]}",
        *rest,
    ]
    return [statement for text in texts if text for statement in _statements(text)]


def _values(program: Program, form: Form) -> dict[str, str]:
    batch = "torch.randint(0, 11, ({rows}, 3))" if program.tokens else "torch.randn({rows}, 8)"
    loss = form.loss or _loss(program)
    unpack = form.unpack
    call = f"result = model(x)\n{unpack}\nloss = {loss}"
    return {
        "batch": batch.format(rows=4),
        "other": batch.format(rows=6),
        "probe": "torch.ones(4, 3, dtype=torch.long)" if program.tokens else "torch.ones(4, 8)",
        "unpack": unpack,
        "unpack_points": unpack,
        "unpack_fake": unpack,
        "loss": loss,
        "loss_fake": form.loss or _loss(program, x="fake"),
        "call": call,
        "call_indented": call.replace("\n", "\n    "),
        "see_kept": "\n".join(f"see('{name}', model.{name})" for name in _kept(program)),
        "unpack_indented": unpack.replace("\n", "\n    "),
        "width": "11" if program.tokens else "4",
    }


def _kept(program: Program) -> list[str]:
    """Tensors that layers keep beside parameters and buffers."""
    return [Template(LAYERS[kind].kept).substitute(i=number) for kind, number in program.layers if LAYERS[kind].kept]


def _statements(text: str) -> list[str]:
    """Splits lines into statements: a line and those below it that are indented or close it."""
    statements: list[str] = []
    for line in filter(None, text.splitlines()):
        if statements and (line.startswith((" ", ")", "]", "else", "except", "finally")) or _is_open(statements[-1])):
            statements[-1] += f"\n{line}"
        else:
            statements.append(line)
    return statements


def _is_open(text: str) -> bool:
    return any(text.count(a) > text.count(b) for a, b in ("()", "[]", "{}"))


def _marked(statements: list[str]) -> list[str]:
    return [line for number, statement in enumerate(statements) for line in (f"at({number})", statement)]


def statement(program: Program, number: int) -> str:
    """The statement with that number."""
    return _lines(program)[number]


def script(program: Program, memory: str | int, says: str) -> str:
    """Returns a program that runs by itself: plainly, or as its reference, and compiled; it prints what differs."""
    options = {"memory": memory, "device": "cpu", **dict(program.options)}
    return f'''"""{says}"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MT_CHECK"] = "{int(program.checked)}"
{source(program)}

class See:
    def __init__(self):
        self.seen, self.handles = [], []

    def __call__(self, label, value):
        self.seen.append((label, copied(value)))


def copied(value):
    if torch.is_tensor(value):
        return value.detach().clone()
    if isinstance(value, dict):
        parts = {{name: copied(part) for name, part in value.items()}}
        return {{name: part for name, part in parts.items() if not isinstance(part, dict) or part}}
    return [copied(part) for part in value] if isinstance(value, (list, tuple)) else value


def differs(a, b):
    if torch.is_tensor(a) and torch.is_tensor(b):
        return not torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return any(differs(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return any(map(differs, a, b))
    return a != b


def run(options):
    torch.set_num_threads(1)
    see = See()
    try:
        program(options, see)
    except Exception as error:
        see("error", f"{{type(error).__name__}}: {{error}}")
    for handle in see.handles:
        handle.remove()
    return see.seen


reference = run({program.reference!r})
ours = run({options!r})
for (label, expected), (other, found) in zip(reference, ours):
    if label != other or differs(expected, found):
        print(f"first difference\\n  expected {{label}}: {{expected}}\\n  found {{other}}: {{found}}")
        break
else:
    print("equal" if len(reference) == len(ours) else "one of them ended early")
'''


__all__ = ["LARGE", "OPTIMIZERS", "READY", "Event", "Program", "script", "source", "statement"]
