"""Of equal blocks a few are traced: the graph is the one that tracing all of them gives, and what is not equal is traced."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mtcompile
from mtcompile import torch_private
from mtcompile.capture import joint as joint_module
from mtcompile.capture import tracing
from mtcompile.capture.stamping.blocks import FEWEST, TRACED, selection_of, structure
from mtcompile.capture.tracing import trace_joint
from mtcompile.errors import CaptureError
from mtcompile.models.decoders import Decoder, fake
from mtcompile.models.shapes import SHAPES, Shape
from mtcompile.passes.graph_json import graph_to_json
from mtcompile.passes.joint.normalize import normalize
from mtcompile.passes.step_graph import kernel_of, regions
from tests.helpers.tracing import values

BLOCKS, WIDTH = 6, 8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """A stem, blocks and a head; subclasses say what a block does."""

    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = BLOCKS) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.through(self.stem(x))).square().mean()

    def through(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = self.run(number, block, x)
        return x

    def run(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Checkpointed(Stack):
    def run(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)


class InPlace(Stack):
    def run(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        y = block(x)
        y *= 0.5
        y += x
        return y


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(5, 5, 3, padding=1), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class Shifted(Stack):
    """Every block reads one table, which is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, WIDTH))

    def run(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return block(x + self.table.sin())


class Biased(Block):
    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = self.norm(x).sin()
        bias = self.up(x).tanh() if bias is None else bias
        return x + self.down(F.gelu(self.up(y * 2) + bias)), bias


class FirstMakesBias(Stack):
    """The first block computes a bias that all blocks add. So the equal blocks begin inside a block."""

    def __init__(self) -> None:
        super().__init__(Biased, 8)

    def through(self, x: Tensor) -> Tensor:
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


class Frozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)


class FirstTied(Stack):
    """The head reads a weight of the first block too."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) + self.blocks[0].up.weight.square().mean()).square()


class Alternating(Stack):
    def run(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return block(x) if number % 2 else block(x.tanh())


class Masked(Stack):
    """Every sixth block reads another mask, as in models with sliding-window attention."""

    def __init__(self, trained: bool = False) -> None:
        super().__init__(count=20)
        self.masks = nn.Parameter(torch.randn(2, 5, WIDTH), requires_grad=trained)

    def through(self, x: Tensor) -> Tensor:
        masks = self.masks[0].sin(), self.masks[1].sin()
        for number, block in enumerate(self.blocks):
            x = block(x * masks[number % 6 == 5])
        return x


class MaskChanges(Stack):
    """Blocks read one of two masks. One was changed in place before the first block."""

    def through(self, x: Tensor) -> Tensor:
        one, other = torch.zeros(5, WIDTH), torch.ones(5, WIDTH)
        one += x[0].detach()
        for number, block in enumerate(self.blocks):
            x = block(x * (one if number % 2 else other))
        return x


class EncoderDecoder(nn.Module):
    """All blocks of the decoder read what the encoder makes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Stack(), Stack()

    def forward(self, x: Tensor) -> Tensor:
        encoded, decoded = self.encoder.through(x), x
        for block in self.decoder.blocks:
            decoded = block(decoded) + block.norm(encoded)
        return decoded.square().mean()


class Scaled(Stack):
    def run(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return block(x) * (number + 1)


class AllRead(Stack):
    """The loss reads what each block makes."""

    def forward(self, x: Tensor) -> Tensor:
        results = [x]
        for block in self.blocks:
            results.append(block(results[-1]))
        return torch.stack(results).square().mean()


class MiddleTied(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.blocks[BLOCKS // 2].up.weight.square().mean()


class OneBlock(Stack):
    """The same block again and again."""

    def run(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return self.blocks[0](x)


class OneDiffers(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[BLOCKS // 2].drop.p = 0.2


class OneFrozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[BLOCKS // 2].up.weight.requires_grad_(False)


class ReadAhead(Stack):
    """Every block first reads a weight of one of them, which is not traced."""

    def run(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return block(x * self.blocks[3].norm.weight)


class ChangedView(Stack):
    """Each block makes a view of the view before; the last one is changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        base, y = self.stem(x), self.head(x)
        view = base[:]
        for block in self.blocks:
            y, view = block(y), view[:]
        view *= 2
        return base.square().mean() + y.square().mean()


class Counted(Stack):
    """What a counter holds becomes a number in the graph, which the first blocks and later ones have in common."""

    def through(self, x: Tensor) -> Tensor:
        number = torch.tensor(0)
        for block in self.blocks:
            x, number = torch.add(block(x), x, alpha=(number > 3).long()), number + 1
        return x


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Buffer(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return super().forward(x) + self.count


class Returning(Stack):
    """Returns what each block makes, and what it keeps, which begins with an empty tensor of its own, as a cache does."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        made: list[Tensor] = []
        x = self.stem(x)
        for block in self.blocks:
            kept = torch.cat([torch.tensor([]), block.up(x)], -1)
            x = block(x) + kept[..., :WIDTH]
            made += [x, kept.transpose(0, 1)]
        return self.head(x).square().mean(), *made


class ReturnedThenChanged(Stack):
    """Returns what each block makes; the next one changes that in place."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        made: list[Tensor] = []
        x = self.stem(x)
        for block in self.blocks:
            y = block(x + 1)
            x *= 2
            x = y + x
            made.append(x)
        return self.head(x).square().mean(), *made


STAMPED: dict[str, Callable[[], nn.Module]] = {
    "plain": Stack,
    "checkpointed": Checkpointed,
    "in place": InPlace,
    "batch norm": lambda: Stack(ConvBlock),
    "a table of all": Shifted,
    "first makes a bias": FirstMakesBias,
    "frozen": Frozen,
    "first tied": FirstTied,
    "alternating": lambda: Alternating(count=12),
    "masked": Masked,
    "two stacks": EncoderDecoder,
    "buffers": lambda: Stack(Counting),
    "returning": lambda: Returning(count=8),
}
WHOLE: dict[str, Callable[[], nn.Module]] = {
    "scaled by number": Scaled,
    "all read": AllRead,
    "middle tied": MiddleTied,
    "masks with gradients": lambda: Masked(trained=True),
    "a mask that changes": lambda: MaskChanges(count=10),
    "one block": OneBlock,
    "one differs": OneDiffers,
    "one frozen": OneFrozen,
    "one weight read by all": lambda: ReadAhead(count=8),
    "changed view of views": ChangedView,
    "counted": lambda: Counted(count=8),
    "returned, then changed": ReturnedThenChanged,
}


def graph_of(model: nn.Module, repeated: tuple[str, int] | None = None, **data: Tensor) -> dict[str, Any]:
    """The normalized joint graph as data."""
    torch.compiler.reset()
    return as_data(trace_joint(model, data, repeated=repeated)[0])


def both_graphs_of(model: nn.Module, backward: bool = True, **data: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of one capture by Dynamo: the graph of all blocks, which is traced first, and the graph that ``joint_graph`` gives."""
    whole = list[dict[str, Any]]()
    plain = joint_module.joint_graph

    def joint_graph(description: Any, tangents: Any, observe: Any) -> fx.GraphModule:
        tangents = tangents if backward else None
        with pytest.MonkeyPatch.context() as patch:
            trace_whole(patch)
            whole.append(as_data(normalize(plain(description, tangents, observe), observe)))
        return plain(description, tangents, observe)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "joint_graph", joint_graph)
        some = graph_of(model, **data)
    return whole[0], some


def as_data(joint: fx.GraphModule) -> dict[str, Any]:
    """Sequence numbers are counted from 0."""
    graph: dict[str, Any] = json.loads(graph_to_json(joint))
    metas = [node["meta"] for node in graph["nodes"] if "seq_nr" in node["meta"]]
    ranks = {number: rank for rank, number in enumerate(sorted({meta["seq_nr"] for meta in metas}))}
    for meta in metas:
        meta["seq_nr"] = ranks[meta["seq_nr"]]
    return graph


def trace_whole(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(joint_module, "shortened", lambda description, tangents, path_of: None)


# More of what others show: several stacks, numbers that blocks count, and a block that differs from the others.
_LONG = ("two stacks", "one weight read by all", "counted", "one frozen")


@pytest.fixture
def inputs_traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many inputs the graphs have that torch traces; none is remembered."""
    monkeypatch.setenv("MT_CACHE", "0")
    counts: list[int] = []
    plain = torch_private.export_joint
    monkeypatch.setattr(torch_private, "export_joint", lambda *args: (counts.append(len(args[2])), plain(*args))[1])
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=[pytest.mark.slow] * (case != "plain") + [pytest.mark.long] * (case in _LONG),
        )
        for case in (*STAMPED, *WHOLE)
    ],
)
def test_the_graph_is_that_of_all_blocks(case: str, inputs_traced: list[int]) -> None:
    whole, some = both_graphs_of({**STAMPED, **WHOLE}[case](), x=torch.randn(2, 5, WIDTH))
    assert some == whole
    assert (max(inputs_traced[1:]) < inputs_traced[0]) == (case in STAMPED)


@pytest.mark.parametrize(
    "kinds", ["aaaaaa", "abababab", "aaaaabaaaaabaaaaabaaaa", "abcabcabcabcabc", "aabbaabbaabbaab", "abbbbbbbba"]
)
def test_blocks_that_are_not_traced_have_templates_with_the_same_neighbours(kinds: str) -> None:
    selection = selection_of(kinds)
    assert selection is not None
    traced = [block for block in range(len(kinds)) if not selection.removed(block)]
    assert [selection.as_traced(block) for block in traced] == list(range(len(kinds) - selection.left_out))
    assert [selection.in_whole(selection.as_traced(block)) for block in traced] == traced
    for block in selection.inner:
        template = selection.template(block)
        assert template in selection.traced_inner and (selection.removed(block) or traced[template] == block)
        around = [kinds[traced[place]] for place in range(template - 1, template + 2)]
        assert around == list(kinds[block - 1 : block + 2])
    last, before = selection.traced_inner[-1], selection.inner[-1]
    assert kinds[traced[last] - 1 : traced[last] + 1] == kinds[before - 1 : before + 1]


def test_all_blocks_are_traced_if_none_are_alike_or_there_are_few() -> None:
    assert selection_of("abcdefghij") is None and selection_of("aaaaa") is None


class Holding(Block):
    """Reads a constant that is another one in one of the blocks which are alike otherwise."""

    def __init__(self, constant: Any, read: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.constant, self.read = constant, read

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.read(x, self.constant))


HELD: dict[str, tuple[Any, Any, Callable[[Tensor, Any], Tensor]]] = {
    "a number": (1.0, 1.0 + 2**-20, lambda x, held: x * held),
    "a slice": (slice(4), slice(3), lambda x, held: x + x[..., held].sum(-1, keepdim=True)),
    "a tensor": (torch.ones(WIDTH), torch.ones(WIDTH) + 2**-20, lambda x, held: x * held),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HELD)
def test_a_constant_that_differs_in_one_block_shows(kind: str) -> None:
    usual, unusual, read = HELD[kind]
    numbers, x = iter(range(8)), torch.randn(2, 5, WIDTH)
    model = Stack(lambda: Holding(unusual if next(numbers) == 4 else usual, read), 8).eval()
    torch.compiler.reset()
    traced = values(*trace_joint(model, {"x": x}))
    model(x).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(torch.equal(gradients[name], traced[name]) for name in gradients)


def test_arguments_that_print_alike_are_not_taken_for_equal() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    ones, other = torch.ones(2000), torch.ones(2000)
    other[1000] = 2
    texts = [structure(graph.call_function(torch.add, (x, held))) for held in (ones, ones, other)]
    assert repr(ones) == repr(other) and texts[0] == texts[1] != texts[2]


@pytest.mark.slow
def test_memory_of_two_blocks_is_refused_as_in_the_whole_graph() -> None:
    model = Stack(Counting)
    model.blocks[3].count = model.blocks[0].count.view(WIDTH)  # only one of the two is traced
    with pytest.raises(CaptureError, match="count shares memory with another tensor"):
        graph_of(model, x=torch.randn(2, 5, WIDTH))


@pytest.mark.slow
def test_blocks_are_stamped_under_autocast_and_without_gradients(inputs_traced: list[int]) -> None:
    for setting in (torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad()):
        inputs_traced.clear()
        with setting:
            whole, some = both_graphs_of(Stack(), x=torch.randn(2, 5, WIDTH))
        assert some == whole and max(inputs_traced[1:]) < inputs_traced[0]


@pytest.mark.slow
def test_a_graph_without_a_backward_is_stamped(inputs_traced: list[int]) -> None:
    whole, some = both_graphs_of(Stack(), backward=False, x=torch.randn(2, 5, WIDTH))
    assert some == whole and max(inputs_traced[1:]) < inputs_traced[0]


@pytest.mark.slow
def test_a_decoder_is_stamped_by_the_names_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(16, 32, BLOCKS, 2, 1, 64, head_dim=8, tied=True)
    data = {"tokens": torch.zeros(2, 6, dtype=torch.int64), "targets": torch.ones(2, 6, dtype=torch.int64)}
    some = [graph_of(Decoder(shape.shortened(traced)), ("blocks", BLOCKS), **data) for traced in (FEWEST, TRACED)]
    trace_whole(monkeypatch)
    assert some == [graph_of(Decoder(shape), **data)] * 2


@pytest.mark.slow
def test_a_stamped_step_is_bit_equal() -> None:
    torch.manual_seed(0)
    plain, x = Stack(), torch.randn(2, 5, WIDTH)
    compiled = Stack()
    compiled.load_state_dict(plain.state_dict())
    program = mtcompile.compile(compiled, memory="64KiB")
    for model in (plain, program):
        torch.manual_seed(1)
        model(x).backward()
    for (name, one), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


@pytest.mark.parametrize("read", [0, 3], ids=["of none", "of one"])
def test_a_step_that_returns_what_its_blocks_make_is_bit_equal(read: int, inputs_traced: list[int]) -> None:
    """Unless a gradient arrives at one of them, which blocks that are not traced would not have."""
    plain, x = Returning(count=8), torch.randn(2, 5, WIDTH)
    compiled = Returning(count=8)
    compiled.load_state_dict(plain.state_dict())
    program = mtcompile.compile(compiled, memory="64KiB")
    results = []
    for model in (plain, program):
        torch.manual_seed(1)
        loss, *made = model(x)
        (loss if not read else loss + made[read].square().sum()).backward()
        results.append([loss, *made])
    assert all(map(torch.equal, *results))
    for (name, one), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name
    assert len(set(inputs_traced)) == (2 if read else 1)  # the first trace does not know of the gradient


def test_a_step_traced_without_memory_has_its_loss_in_chunks() -> None:
    """What is made of a graph's fake tensors is of their mode, whichever is active."""
    with torch_private.without_memory():
        model = fake(SHAPES["gpt-11m"].shortened(2))
        tokens = torch.zeros(2, 64, dtype=torch.int64)
        step = tracing.trace(model, {"tokens": tokens, "targets": tokens}, loss_chunks=4).step
    assert (
        sum("log_softmax" in str(node.target) for region in regions(step) for node in kernel_of(step, region).graph.nodes) >= 4
    )
