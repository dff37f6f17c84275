"""Builds exact kernels: the body of a region in which chains are kernels of Inductor that have shown eager's bits.

    body ──chains_of──► chains ──compile──► kernels ──proof──► those with eager's bits ──┐
      └── all other operations, as they are ─────────────────────────────────────────────┴──► the body to run

A compiled chain serves only after it gave eager's bits twice: on drawn operands with all edges, when it is built, and on the
real operands of its first runs. If they differ there, the step takes eager's result, and the operation that differs is searched
for. It stays eager in all chains that are built from then on; a chain that has served until then stays eager as a whole.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import fx
from torch.fx.node import map_arg

from mtcompile import cache, knobs, torch_private
from mtcompile.capture.refusals import first_line
from mtcompile.errors import ends_device
from mtcompile.kernels.chains.proof import differing_operation, digests, drawn, first_difference
from mtcompile.kernels.chains.split import (
    Chain,
    chains_of,
    elementwise_nbytes,
    in_order,
    operation_key,
)
from mtcompile.kernels.compile_pool import compile_ahead, record_compiled
from mtcompile.kernels.eager import Built, EagerKernels, measured_kernel
from mtcompile.kernels.inductor import compile_kernel, difference_of_run
from mtcompile.kernels.zeros.run import Call
from mtcompile.machine.system_files import driver_version
from mtcompile.passes.lazy_graph import LazyGraphModule, forward_of
from mtcompile.passes.step_graph import body_outputs, new_node, placeholders
from mtcompile.runtime.schedule import listed

aten = torch.ops.aten
_MOST_NAMED = 12
Differed = Callable[[fx.GraphModule, Sequence[torch.Tensor]], None]


@dataclass(frozen=True, slots=True)
class Proof:
    """How chains show that they have eager's bits. ``drawn``: by drawn operands; ``runs``: the first runs of each whose real
    operands are compared (with MT_CHECK=1, all runs)."""

    drawn: bool = True
    runs: int = 4


class FusedChain:
    """A compiled chain that serves, as a function of its operands. ``left``: the next runs that are compared with eager's.
    ``differed``: told when one is not equal; from then on, its operations run one by one."""

    def __init__(self, kernel: fx.GraphModule, compiled: Call, runs: int, differed: Differed) -> None:
        self.kernel, self.compiled, self.left, self.differed = kernel, compiled, runs, differed
        self.eager = forward_of(kernel)
        self.__name__, self.__module__ = f"chain_{kernel.meta['name']}", __name__  # what graphs print

    def __call__(self, *operands: torch.Tensor) -> Sequence[torch.Tensor]:
        if not self.left and not knobs.check():
            return self.compiled(*operands)  # type: ignore[no-any-return]
        if self.compiled is self.eager:
            return self.eager(*operands)  # type: ignore[no-any-return]
        self.left = max(0, self.left - 1)
        try:
            found = digests(self.compiled(*operands))
        except Exception as error:
            if ends_device(error) or isinstance(error, torch.OutOfMemoryError):
                raise
            found = []
        results: Sequence[torch.Tensor] = self.eager(*operands)
        if digests(results) != found:
            self.compiled = self.eager
            self.differed(self.kernel, operands)
        return results


class ExactKernels:
    """Builds exact kernels, each distinct chain once for all kernels. ``device``: where they run. ``compiled``: compiles a
    chain. ``proof``: how it shows its bits."""

    def __init__(self, device: torch.device, compiled: Callable[[fx.GraphModule], Call] | None = None, proof: Proof = Proof()):
        self.device, self.proof = device, proof
        self.compiled = compiled or functools.partial(_compiled, device=device)
        self.known: dict[tuple[str, int], Built] = {}
        self.chains: dict[tuple[str, int], FusedChain | None] = {}
        self.refused: dict[str, str] = {}  # by key, chains that could not be compiled or compared, in words
        self._is_cached = compiled is None

    @functools.cached_property
    def shown(self) -> Shown:
        """The results of all proofs on the device."""
        return Shown(cache.chains_key(_identity(self.device)) if self._is_cached else None)

    def build(self, kernels: Iterable[fx.GraphModule], eager: EagerKernels) -> dict[str, Built]:
        """Builds every kernel, and returns them by name."""
        kernels, threads = list(kernels), torch.get_num_threads()
        new = [kernel for kernel in kernels if (kernel.meta["key"], threads) not in self.known]
        if self.device.type == "cpu" and new:
            chains = {chain.kernel.meta["key"]: chain.kernel for kernel in new for chain in self._chains(kernel)}
            for _ in compile_ahead([c for key, c in chains.items() if (key, threads) not in self.chains], strict=True):
                pass
        for kernel in new:
            self.known[kernel.meta["key"], threads] = self._built(kernel, eager)
        self.shown.save()
        return {str(kernel.meta["name"]): self.known[kernel.meta["key"], threads] for kernel in kernels}

    def notes(self) -> tuple[str, ...]:
        """Says which operations, of this model or of others, stay eager as compiled ones have shown other bits."""
        if not self.known:
            return ()
        differing = [*self.shown.operations.values(), *self.shown.chains.values()]
        other_bits = (
            f"exact kernels: eager wherever they occur, as Inductor's bits differ: {listed(differing, most=_MOST_NAMED)}"
        )
        refused = f"exact kernels: eager, as they could not be compiled: {listed([*self.refused.values()], most=_MOST_NAMED)}"
        return (*[other_bits] * bool(differing), *[refused] * bool(self.refused))

    def _chains(self, kernel: fx.GraphModule) -> list[Chain]:
        return chains_of(kernel, lambda node: operation_key(node) in self.shown.operations)

    def _built(self, kernel: fx.GraphModule, eager: EagerKernels) -> Built:
        while True:
            excluded = len(self.shown.operations)
            fused = [(chain, self._fused(chain.kernel)) for chain in self._chains(kernel)]
            if len(self.shown.operations) == excluded:
                break
        served = {chain: call for chain, call in fused if call is not None}
        nbytes, in_chains = elementwise_nbytes(kernel), sum(chain.nbytes for chain in served)
        if not served:
            return replace(eager(kernel), elementwise_nbytes=nbytes)
        self._compare_next_runs(served.values())  # so that comparing is measured
        built = measured_kernel(kernel, _with_chains(kernel, served), self.device)
        self._compare_next_runs(served.values())
        return replace(built, elementwise_nbytes=nbytes, in_chains_nbytes=in_chains)

    def _compare_next_runs(self, chains: Iterable[FusedChain]) -> None:
        for chain in chains:
            chain.left = self.proof.runs

    def _fused(self, chain: fx.GraphModule) -> FusedChain | None:
        """Returns a chain that has shown its bits on drawn operands; None for one that stays eager."""
        key = chain.meta["key"], torch.get_num_threads()
        if key not in self.chains:
            self.chains[key] = self._proven(chain)
        return self.chains[key]

    def _proven(self, chain: fx.GraphModule) -> FusedChain | None:
        key = chain.meta["key"]
        if key in self.shown.chains:
            return None
        why = ""
        try:
            call = self.compiled(chain)
            why = difference_of_run(chain, call, self.device)
            if not why and self.proof.drawn and (key not in self.shown.equal or knobs.check()):
                number = first_difference(chain, call, self.device)
                if number is not None:
                    differing = differing_operation(chain, self.compiled, drawn(chain, self.device, number))
                    self.shown.operations[operation_key(differing)] = _named(differing)
                    return None
                self.shown.equal.add(key)
        except torch.OutOfMemoryError:
            why = "no room to compare its results"
        except Exception as error:
            if ends_device(error):
                raise
            why = f"{type(error).__name__}: {first_line(error)}"
        if why:
            self.refused[key] = f"{_told(chain)} ({why})"
            return None
        return FusedChain(chain, call, self.proof.runs, self._differed)

    def _differed(self, chain: fx.GraphModule, operands: Sequence[torch.Tensor]) -> None:
        """Notes that a chain that serves differs on real operands."""
        self.shown.equal.discard(chain.meta["key"])
        self.shown.chains[chain.meta["key"]] = _told(chain)
        with contextlib.suppress(Exception):  # if it cannot be compiled in part, all of it stays eager
            differing = differing_operation(chain, self.compiled, operands)
            self.shown.operations[operation_key(differing)] = _named(differing)
        self.shown.save()
        warnings.warn(
            f"the compiled chain {_told(chain)} has other bits than eager PyTorch on operands of this step. Eager's were "
            "used, and the chain stays eager from now on. Please report it with what MT_DUMP=dir writes",
            stacklevel=2,
        )


class Shown:
    """The results of proofs on a device, kept in the cache between runs. ``equal``: the keys of those with eager's bits on
    drawn operands. ``chains``: by key, those that stay eager, in words; ``operations``: by key, those that no chain holds."""

    def __init__(self, cached: str | None) -> None:
        self.cached = cached
        self.equal, self.operations, self.chains = cache.read_chains(cached)
        self._saved = self._count()

    def _count(self) -> tuple[int, ...]:
        return len(self.equal), len(self.operations), len(self.chains)

    def save(self) -> None:
        """Writes the file in the cache again if something was added."""
        if self.cached is not None and self._count() != self._saved:
            cache.write_chains(self.cached, (self.equal, self.operations, self.chains))
            self._saved = self._count()


def _identity(device: torch.device) -> str:
    driver = driver_version(Path("/")) if device.type != "cpu" else ""
    return f"{torch_private.numerics_identity(device)} {driver}"


def _compiled(chain: fx.GraphModule, device: torch.device) -> Call:
    call = compile_kernel(chain, device, strict=True)
    record_compiled(chain, strict=True)
    return call


def _named(node: fx.Node) -> str:
    """Names an operation with the dtypes and numbers that it takes: with others its bits may be equal."""
    dtypes = [str(operand.meta["val"].dtype).removeprefix("torch.") for operand in node.all_input_nodes]
    numbers = [str(value) for value in node.args if isinstance(value, (int, float))]
    return f"{str(node.target).removeprefix('aten.').partition('.')[0]} ({', '.join(dtypes + numbers)})"


def _told(chain: fx.GraphModule) -> str:
    """Names a chain by its operations."""
    nodes = [node for node in chain.graph.nodes if node.op == "call_function" and hasattr(node.target, "overloadpacket")]
    return " > ".join(dict.fromkeys(node.target.overloadpacket.__name__ for node in nodes))


def _with_chains(kernel: fx.GraphModule, chains: Mapping[Chain, FusedChain]) -> fx.GraphModule:
    """Returns a kernel's body in which chains are one call each, where its last operation was or before the first call that
    reads a result of it."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    chain_of = {node: chain for chain in chains for node in chain.nodes}
    called: dict[Chain, fx.Node] = {}
    ordered = [node for node in kernel.graph.nodes if in_order(node)]
    earlier = dict(zip(ordered[1:], ordered, strict=False))
    outputs = body_outputs(kernel)
    for node in placeholders(kernel.graph):
        copies[node] = graph.node_copy(node)

    def call(chain: Chain) -> None:
        if chain in called:
            return
        args = tuple(copied(operand) for operand in chain.operands)
        made = called[chain] = new_node(graph, "call_function", chains[chain], args, {}, f"chain_{len(called)}")
        made.meta["val"] = tuple(node.meta["val"] for node in body_outputs(chain.kernel))
        seen = set[int]()
        for node, position in chain.results.items():
            copies[node] = new_node(graph, "call_function", operator.getitem, (made, position), {}, node.name)
            copies[node].meta["val"] = node.meta["val"]
            if node in outputs and position in seen:  # results share no memory
                copies[node] = new_node(graph, "call_function", aten.clone.default, (copies[node],), {}, f"{node.name}_copy")
                copies[node].meta["val"] = node.meta["val"]
            seen |= {position} if node in outputs else set()

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            if node in chain_of:
                call(chain_of[node])
            else:
                if node in earlier:
                    copied(earlier[node])
                for operand in node.all_input_nodes:
                    copied(operand)
                copies[node] = graph.node_copy(node, copies.__getitem__)
        return copies[node]

    needed = _needed(kernel, chains)
    last = {chain.nodes[-1]: chain for chain in chains}
    for node in kernel.graph.nodes:
        if node in last:
            call(last[node])
        elif node in needed and node.op == "call_function":
            copied(node)
    graph.output(map_arg(kernel.graph.output_node().args[0], copied))
    return LazyGraphModule(kernel, graph, class_name=f"exact_{kernel.meta['name']}")


def _needed(kernel: fx.GraphModule, chains: Iterable[Chain]) -> set[fx.Node]:
    """Returns the nodes that a body needs beside its chains: not the views that these do themselves."""
    inside, found = {node for chain in chains for node in chain.nodes}, set[fx.Node]()
    asked = [node for node in kernel.graph.nodes if in_order(node)] + body_outputs(kernel)
    asked += [operand for chain in chains for operand in chain.operands]
    while asked:
        node = asked.pop()
        if node not in found and node not in inside:
            found.add(node)
            asked += node.all_input_nodes
    return found
