"""Shows that a compiled chain has eager's bits, and finds the operation that has not.

Compared are bits: 0 and -0 differ. Only a NaN equals any other NaN, since eager PyTorch does not promise which of the many it
returns: its vector code and the scalar code for what is left over at the end of a tensor already give different ones.

Results are compared by a digest of their bits. So one run's results are gone before the other run begins, and comparing takes
no memory beside that of either run alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import fx, nn

from mtcompile.kernels.zeros.run import Call
from mtcompile.passes.analysis.kernels import install
from mtcompile.passes.step_graph import body_outputs, is_view, new_node, placeholders, span_nbytes

Compile = Callable[[fx.GraphModule], Call]

_HALVES = (torch.bfloat16, torch.float16)
_ALL_HALVES = 1 << 16  # values of a dtype of 16 bits
_BLOCK = _ALL_HALVES + 257  # values that are drawn at once, and repeated in another order by each operand
_FEWEST_ROUNDS = 4
_MOST_ELEMENTS = 1 << 26  # of all operands in all rounds, unless the fewest have more
_PART = 1 << 14  # elements that are looked at in one piece on a CPU, and
_PART_OF_GPU = 1 << 20  # on a GPU
_INTEGERS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_INTEGERS = (-100, -1, 0, 1, 2, 3, 64, 1000)


def digests(results: Sequence[torch.Tensor]) -> list[str]:
    """Returns a digest of the bits, dtype and shape of each tensor."""
    return [_digest(result) for result in results]


def _digest(tensor: torch.Tensor) -> str:
    import xxhash

    digest = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = _flat(tensor)
    whole, nan = _INTEGERS_OF[tensor.element_size()], None
    if tensor.is_floating_point():  # what is above infinity, without the sign
        nan = int(torch.tensor(math.inf, dtype=tensor.dtype).view(whole)) + 1
    for part in flat.split(_PART if flat.device.type == "cpu" else _PART_OF_GPU):
        bits = part.cpu().view(whole).numpy()
        if nan is not None and (are_nan := (bits & np.iinfo(bits.dtype).max) >= nan).any():
            bits = np.where(are_nan, np.asarray(nan, bits.dtype), bits)  # numpy's memory: the device's is counted
        digest.update(bits)
    return str(digest.hexdigest())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements in the order of their memory, as a view if there is nothing between them."""
    if tensor.numel() * tensor.element_size() == span_nbytes(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


# -------------------------------------------------------------------------------------------------------- drawn operands


def rounds(kernel: fx.GraphModule) -> int:
    """Returns how often operands are drawn: until each operand of 16 bits has had all values, if that ends soon."""
    counts = [node.meta["val"].numel() for node in placeholders(kernel.graph)]
    halves = [node.meta["val"].numel() for node in placeholders(kernel.graph) if node.meta["val"].dtype in _HALVES]
    wanted = 2 * -(-_ALL_HALVES // min(halves, default=_ALL_HALVES))
    most: int = _MOST_ELEMENTS // max(1, sum(counts))
    return max(_FEWEST_ROUNDS, min(wanted, most))


def drawn(
    kernel: fx.GraphModule, device: torch.device, number: int, blocks: dict[tuple[int, bool], torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Draws operands of a chain for one round. They are usual values in round 0, and all edges in odd rounds: zeros of both
    signs, denormals, infinities, NaN, the largest; of 16 bits, all values. In other rounds, each operand has one of both.
    ``blocks``: of this chain, which all rounds share; filled here."""
    choice, operands, blocks = torch.Generator().manual_seed(number), [], {} if blocks is None else blocks
    for place, node in enumerate(placeholders(kernel.graph)):
        edges, val = number % 2 == 1 or (number > 0 and bool(torch.randint(2, (), generator=choice))), node.meta["val"]
        elements = span_nbytes(val) // val.element_size()
        if (block := blocks.get((place, edges))) is None:
            draw = _edges if edges else _usual
            block = blocks[place, edges] = draw(val.dtype, torch.Generator().manual_seed(place))
        block = block.roll(-(number // 2) * elements).to(device)
        whole = block.repeat(-(-elements // len(block)))[:elements] if elements > len(block) else block[:elements].clone()
        operands.append(whole.as_strided(val.shape, val.stride()))
    return operands


def _usual(dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.randint(2, (_BLOCK,), generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.tensor(_INTEGERS, dtype=dtype)[torch.randint(len(_INTEGERS), (_BLOCK,), generator=generator)]
    sizes = 10.0 ** torch.empty(_BLOCK).uniform_(-3, 1.5, generator=generator)
    return (torch.randn(_BLOCK, generator=generator) * sizes).to(dtype)


def _edges(dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype in _HALVES:
        return torch.randperm(_ALL_HALVES, generator=generator).to(torch.int32).to(torch.int16).view(dtype)
    if not dtype.is_floating_point:
        return _usual(dtype, generator)
    about = torch.finfo(dtype)
    least = about.smallest_normal * about.eps
    named = [0.0, least, about.smallest_normal, about.eps, 1.0, 1 + about.eps, about.max, math.inf, math.nan]
    values = torch.tensor([*named, *(-value for value in named)], dtype=dtype).repeat(_BLOCK // 36)
    numbers = np.random.default_rng(int(torch.randint(1 << 31, (), generator=generator)))
    size = torch.empty((), dtype=dtype).element_size()
    any_bits = torch.from_numpy(numbers.integers(0, 256, (_BLOCK - len(values)) * size, dtype=np.uint8)).view(dtype)
    return torch.cat([values, any_bits])[torch.randperm(_BLOCK, generator=generator)]


def first_difference(kernel: fx.GraphModule, call: Call, device: torch.device) -> int | None:
    """Returns the first round of drawn operands whose results differ from eager's; None if there is none."""
    blocks = dict[tuple[int, bool], torch.Tensor]()
    return next((n for n in range(rounds(kernel)) if differs(kernel, call, drawn(kernel, device, n, blocks))), None)


def differs(kernel: fx.GraphModule, call: Call, operands: Sequence[torch.Tensor]) -> bool:
    """Tells whether the results of a compiled chain differ from eager's."""
    with torch.no_grad():
        found = digests(call(*operands))
        return found != digests(kernel(*operands))


# ---------------------------------------------------------------------------------------------- the operation that differs


def differing_operation(kernel: fx.GraphModule, compiled: Compile, operands: Sequence[torch.Tensor]) -> fx.Node:
    """Returns the first operation of a chain, which differs from eager as a whole, up to which it does: by halves."""
    operations: list[fx.Node] = [node for node in kernel.graph.nodes if node.op == "call_function" and not is_view(node)]
    equal, different = 0, len(operations)
    while different - equal > 1:
        middle = (equal + different) // 2
        beginning = _beginning(kernel, operations[:middle])
        if differs(beginning, compiled(beginning), operands):
            different = middle
        else:
            equal = middle
    return operations[different - 1]


def _beginning(kernel: fx.GraphModule, operations: Sequence[fx.Node]) -> fx.GraphModule:
    """Returns the first operations of a chain as a chain, whose results are those that others read."""
    within, results = set(operations), set(body_outputs(kernel))
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in kernel.graph.nodes:
        if node.op == "placeholder" or node in within or (is_view(node) and all(n in copies for n in node.all_input_nodes)):
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), copies.__getitem__)
            copies[node] = new_node(graph, node.op, node.target, args, kwargs, node.name)
            copies[node].meta["val"] = node.meta["val"]

    def is_read(node: fx.Node) -> bool:
        return node in results or any(is_read(user) if is_view(user) else user not in within for user in node.users)

    graph.output(tuple(copies[node] for node in operations if is_read(node)))
    for node in reversed(graph.nodes):
        if is_view(node) and not node.users:
            graph.erase_node(node)
    owner = nn.Module()
    beginning = owner.get_submodule(install(owner, {}, graph))
    assert isinstance(beginning, fx.GraphModule)
    return beginning
