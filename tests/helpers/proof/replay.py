"""What a step really does: its schedule run in list order over memory that binds by name, beside the captured graph.

``why_unsafe`` says what goes wrong, or None: other numbers under some name, another generator, bytes outside of what was
declared, results that are not where their reader looks, bytes that move for nothing. It knows nothing of value numbers and
shares no code with ``passes/proof``, ``passes/lower`` or ``runtime/verify``. Orders other than the list's are the business of
``tests/helpers/proof/oracle``.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mtcompile.passes.step_graph import convert, gradient_norms, gradient_scale, update
from mtcompile.runtime.schedule import Buffer, Schedule
from tests.helpers.proof.subjects import Subject

SEED = 11
Results = dict[tuple[str, str], Tensor]  # by kind and name


class Unsafe(Exception):
    """The step goes wrong; the message says how."""


def why_unsafe(subject: Subject, step: fx.GraphModule, schedule: Schedule) -> str | None:
    """What goes wrong where this step and schedule stand for the subject's own; None if nothing does."""
    try:
        _Replay(subject, step, schedule).run()
    except Unsafe as unsafe:
        return str(unsafe)
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError, AttributeError, AssertionError) as error:
        return f"raises {error!r}"
    return None


def _number(name: str) -> float:
    """A number of a name's own."""
    return 1.0 + zlib.crc32(name.encode()) % 997 / 997


# An optimizer that tells parameters apart by name, as a real one's state does.


def _new_version(name: str, param: Tensor, grad: Tensor, scale: Tensor | None) -> Tensor:
    scaled = grad.float() * (1.0 if scale is None else float(scale))
    return (param.float() * 0.75 - scaled * _number(name)).to(param.dtype)


def _norm(grad: Tensor) -> Tensor:
    return torch.linalg.vector_norm(grad.float())


def _scale(norms: Mapping[str, Tensor]) -> Tensor:
    return 1.0 / (1.0 + sum(norms[name] * _number(name) for name in sorted(norms)))


# ------------------------------------------------------------------------------------------------------------- the truth


def _truth(subject: Subject) -> tuple[Results, Tensor, Tensor]:
    """The results of the captured graph, and the generator after the forward and after all."""
    joint, values = subject.joint, dict[fx.Node, Any]()
    inputs = iter(joint.meta["inputs"])
    torch.manual_seed(SEED)
    after_forward = torch.get_rng_state()
    with torch.no_grad():
        for node in joint.graph.nodes:
            if node.op == "placeholder":
                values[node] = _given(subject, next(inputs), node).clone()
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
                if (node.meta["region"][0] if "region" in node.meta else node.meta["phase"]) == "forward":
                    after_forward = torch.get_rng_state()
    outputs = joint.graph.output_node().args[0]
    results = {(s.kind, s.name): values[node] for s, node in zip(joint.meta["outputs"], outputs, strict=True)}
    params = {spec.name for spec in joint.meta["inputs"] if spec.role == "param"}
    updates = subject.given.budgets.updates
    if updates is not None:
        by_index = {spec.index: spec.name for spec in joint.meta["inputs"] if spec.role == "param"}
        names = {s.name: by_index[s.index] for s in joint.meta["outputs"] if s.kind == "grad" and s.index in by_index}
        grads = {names[name]: results.pop(("grad", name)) for name in names}
        scale = _scale({name: _norm(grad) for name, grad in grads.items()}) if updates.held else None
        for spec in joint.meta["inputs"]:
            if spec.name in grads and spec.name in params:
                results["weight", spec.name] = _new_version(spec.name, subject.inputs[spec.index], grads[spec.name], scale)
    return results, after_forward, torch.get_rng_state()


_TRUTHS: dict[int, tuple[Subject, tuple[Results, Tensor, Tensor]]] = {}  # by a subject's id, which is kept with it


_NODES: dict[int, dict[str, fx.Node]] = {}  # of a subject's step, by its id


def _truth_of(subject: Subject) -> tuple[Results, Tensor, Tensor]:
    if id(subject) not in _TRUTHS:
        _TRUTHS[id(subject)] = subject, _truth(subject)
    return _TRUTHS[id(subject)][1]


def _given(subject: Subject, spec: Any, node: fx.Node) -> Tensor:
    if spec.role == "tangent":
        return torch.ones(tuple(node.meta["val"].shape), dtype=node.meta["val"].dtype)
    if spec.role == "constant":
        constant: Tensor = subject.joint.meta["constants"][spec.name]
        return constant
    return subject.inputs[spec.index]


# ------------------------------------------------------------------------------------------------------------ the replay


def _span(val: Tensor) -> int:
    if not val.numel():
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(val.shape, val.stride(), strict=True))) * val.element_size()


class _Replay:
    """``tensors``: what each name is bound to. ``places``: the tier that a bound tensor really is in. ``pooled``: bytes of the
    live results of kernels, as they are and as declared."""

    def __init__(self, subject: Subject, step: fx.GraphModule, schedule: Schedule) -> None:
        self.subject, self.step, self.schedule = subject, step, schedule
        self.nodes = {node.name: node for node in step.graph.nodes}
        self.vals = {name: self.nodes[name].meta["val"] for name in schedule.buffers}
        self.arenas = {tier: torch.zeros(schedule.arena_nbytes.get(tier, 0), dtype=torch.uint8) for tier in ("device", "host")}
        self.tensors: dict[str, Tensor] = {}
        self.places: dict[str, str] = {}
        self.held: dict[str, int] = {}  # bytes of live results of kernels
        self.moved = 0
        self.states: list[Tensor] = []  # of the generator; torch crashes on others, and on those within an arena
        self.tiers: dict[int, str] = {}  # of the homes of inputs
        self.weights: dict[str, Tensor] = {}

    def run(self) -> None:
        truth, after_forward, after_all = _truth_of(self.subject)
        self._bind()
        self._count_resident()
        torch.manual_seed(SEED)
        results: Results = {}
        for phase in ("forward", "backward"):
            with torch.no_grad():
                for _, instruction in self.schedule.phase(phase):
                    getattr(self, f"_{instruction.op}")(instruction)
                    self._fits(instruction)
            results |= self._leaving(("output", "mutation") if phase == "forward" else ("grad",))
            state = after_forward if phase == "forward" else after_all
            self._need(torch.equal(torch.get_rng_state(), state), f"the {phase} leaves the generator elsewhere")
        for spec in self.step.meta["outputs"]:
            if spec.kind == "update":
                results["weight", self._param(spec.index).name] = self.weights[self._param(spec.index).name]
        self._need(results.keys() == truth.keys(), f"results are {sorted(results)}, not {sorted(truth)}")
        for key, value in truth.items():
            alike = results[key].dtype == value.dtype and results[key].stride() == value.stride()
            self._need(alike and torch.equal(results[key], value), f"{key} has other bits")
        own = sum(_span(self._own(name)) for i in self.subject.schedule.instructions if i.op == "copy" for name in i.reads)
        self._need(self.moved <= own, f"{self.moved} bytes are moved, {own} are needed")
        self._need(not self.held, f"{sorted(self.held)} are never freed")

    @staticmethod
    def _need(condition: bool, wrong: str) -> None:
        if not condition:
            raise Unsafe(wrong)

    def _own(self, name: str) -> Tensor:
        """The subject's own value of that name."""
        if id(self.subject) not in _NODES:
            _NODES[id(self.subject)] = {node.name: node for node in self.subject.step.graph.nodes}
        val: Tensor = _NODES[id(self.subject)][name].meta["val"]
        return val

    def _param(self, index: int) -> Any:
        return next(s for s in self.subject.joint.meta["inputs"] if (s.role, s.index) == ("param", index))

    # what is there before the step

    def _bind(self) -> None:
        """Homes, as the executor finds them: inputs by the step's own list of them, each parameter where the plan says."""
        plan, homes = self.subject.given.plan, self.step.meta["homes"]
        tensors: dict[int, Tensor] = {}
        graph = zip(self.step.meta["inputs"], self.step.graph.find_nodes(op="placeholder"), strict=True)
        for spec, node in graph:
            constant = self.step.meta["constants"].get(spec.name) if spec.role == "constant" else None
            tensor = (_given(self.subject, spec, node) if constant is None else constant).clone()
            place = "device" if spec.role == "tangent" else spec.tier
            if spec.role == "param" and spec.name in homes:
                place = "device" if plan.params(homes[spec.name]) == "device" else "host"
            if spec.role not in ("tangent", "constant"):
                tensor = tensors.setdefault(spec.index, tensor)
                self.tiers[spec.index] = place
            if spec.role == "param":
                self.weights[self._param(spec.index).name] = tensor
            self.tensors[node.name], self.places[node.name] = tensor, place
        for spec, value in self._outputs():
            if self.schedule.buffers[value.name].kind == "home" and spec.kind != "update":
                val = self.vals[value.name]
                self.tensors[value.name] = torch.empty_strided(tuple(val.shape), tuple(val.stride()), dtype=val.dtype)
                self.places[value.name] = "host"
        for name, tensor in self.tensors.items():
            self._declared(name, _span(tensor))

    def _outputs(self) -> list[tuple[Any, fx.Node]]:
        values: Any = self.step.graph.output_node().args[0]
        return list(zip(self.step.meta["outputs"], values, strict=True))

    def _count_resident(self) -> None:
        """What the model holds at all times, from its real tensors."""
        budgets, homes = self.subject.given.budgets, self.step.meta["homes"]
        state, waiting = budgets.state or {}, 0 if budgets.updates is not None else 1
        held = {"device": float(budgets.reserve), "host": 0.0}
        for spec, node in zip(self.subject.joint.meta["inputs"], self.subject.joint.graph.nodes):
            if spec.role == "param" and spec.name in homes:
                nbytes = _span(node.meta["val"])
                trained = state.get(spec.name, 0) if budgets.state is not None else nbytes * budgets.state_copies
                held[self.tiers[spec.index]] += nbytes + (trained + waiting * nbytes if spec.differentiable else 0)
        for tier, nbytes in held.items():
            declared = self.schedule.resident_nbytes.get(tier, 0)
            self._need(declared >= int(nbytes), f"{declared} bytes are resident in {tier}, {nbytes} are")
        limits = {tier: nbytes for tier, nbytes in budgets.nbytes.items() if nbytes is not None}
        for tier, limit in limits.items():
            self._need(self.schedule.budget_nbytes.get(tier, limit + 1) <= limit, f"more of {tier} is used than was asked for")
        ahead = budgets.updates is not None and budgets.updates.run_ahead
        self._need(ahead or not self.schedule.run_ahead, "updates run ahead unasked")

    def _declared(self, name: str, nbytes: int) -> None:
        """Checks a tensor against its buffer."""
        buffer = self.schedule.buffers[name]
        self._need(buffer.nbytes >= nbytes, f"{name} needs {nbytes} bytes, {buffer.nbytes} are declared")
        self._need(buffer.tier == self.places[name], f"{name} is on the {self.places[name]}, not on {buffer.tier}")
        val, tensor = self.vals[name], self.tensors[name]
        alike = (val.dtype, val.shape, val.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        self._need(alike, f"{name} is described as another tensor than it is")

    # instructions

    def _alloc(self, instruction: Any) -> None:
        (name,) = instruction.writes
        buffer = self.schedule.buffers[name]
        if buffer.kind == "placed":
            self._place(name, buffer)
        elif any(i.op == "copy" and name in i.writes for i in self.schedule.instructions):  # it is fetched, and none makes it
            val = self.vals[name]
            self.tensors[name] = torch.empty_strided(tuple(val.shape), tuple(val.stride()), dtype=val.dtype)
            self.places[name], self.held[name] = buffer.tier, _span(val)
            self._declared(name, _span(val))

    def _place(self, name: str, buffer: Buffer) -> None:
        tier = "device" if buffer.tier == "device" else "host"
        val, offset = self.vals[name], buffer.offset
        assert offset is not None
        self._need(offset >= 0 and offset + _span(val) <= self.arenas[tier].numel(), f"{name} lies outside of its arena")
        storage = self.arenas[tier].untyped_storage()
        whole = torch.empty(0, dtype=val.dtype)
        start = offset // val.dtype.itemsize
        self.tensors[name] = whole.set_(storage, start, tuple(val.shape), tuple(val.stride()))
        self.places[name] = tier
        self._declared(name, _span(val))

    def _free(self, instruction: Any) -> None:
        (name,) = instruction.writes
        tensor = self.tensors.pop(name)
        self.held.pop(name, None)
        if tensor.numel():
            span = torch.empty(0, dtype=torch.uint8)
            offset = tensor.storage_offset() * tensor.element_size()
            span.set_(tensor.untyped_storage(), offset, (_span(tensor),), (1,)).zero_()  # as indices, inside of everything

    def _copy(self, instruction: Any) -> None:
        directions = {"h2d": ("host", "device"), "d2h": ("device", "host")}
        reads = instruction.reads[:-1] if instruction.ends else instruction.reads[:1] if instruction.rows else instruction.reads
        for read, write in zip(reads, instruction.writes, strict=True):
            source, target = self.tensors[read], self.tensors[write]
            there = directions.get(instruction.queue) == (self.places[read], self.places[write])
            self._need(there, f"{instruction.queue} copies {read} to {write}")
            size = len(target.shape) if instruction.rows else target.shape
            alike = (source.dtype, len(source.shape) if instruction.rows else source.shape, source.stride())
            self._need(alike == (target.dtype, size, target.stride()), f"{read} and {write} are laid out differently")
            if instruction.rows:
                named = torch.cat([self.tensors[name].flatten() for name in instruction.rows]).unique()
                to_device = instruction.queue == "h2d"
                target.fill_(torch.nan if to_device else 0.0)
                if to_device:
                    target[: len(named)] = source[named]
                else:
                    target[named] = source[: len(named)]
            else:
                target.copy_(source)
            if instruction.ends:
                ends = self.tensors[instruction.ends]
                self._need(self.places[instruction.ends] == "device", f"{instruction.ends} is elsewhere")
                target[ends.diff(prepend=ends.new_zeros(1)) == 0] = torch.nan
            self.moved += _span(source)
        declared = sum(self.schedule.buffers[name].nbytes for name in reads)
        if instruction.rows:
            names = sum(self.tensors[name].numel() for name in instruction.rows)
            declared = min(len(source), names) * source[0].numel() * source.element_size()
        self._need(instruction.nbytes == declared, f"a copy of {declared} bytes says that it moves {instruction.nbytes}")

    def _run(self, instruction: Any) -> None:
        place = {"compute": "device", "host": "host"}[instruction.queue]
        for name in instruction.reads:
            self._need(self.places[name] == place, f"a kernel of queue {instruction.queue} reads {name} elsewhere")
        operands = [self.tensors[name] for name in instruction.reads]
        node = self.nodes.get(instruction.kernel)
        if node is None or node.op == "call_module":
            kernel = self.step.get_submodule(instruction.kernel)
            needed = self.subject.given.workspace(kernel)
            self._need(instruction.workspace >= needed, f"{instruction.kernel} needs {needed} bytes of workspace")
            for operand, taken in zip(operands, kernel.graph.find_nodes(op="placeholder"), strict=True):
                val = taken.meta["val"]
                alike = (val.dtype, val.shape, val.stride()) == (operand.dtype, operand.shape, operand.stride())
                self._need(alike, f"{instruction.kernel} takes other tensors")
                state = taken.meta["val"].dtype != torch.uint8 or any(torch.equal(operand, one) for one in self.states)
                self._need(state, f"{instruction.kernel} takes what is no generator's state")
            outputs = kernel.forward(*(one.clone() if one.dtype == torch.uint8 else one for one in operands))
            self.states += [tensor.clone() for tensor in outputs if tensor.dtype == torch.uint8]
        else:
            outputs = self._by_name(node, operands)
            updates = self.subject.given.budgets.updates
            if node.target is update and place == "device" and updates is not None:
                needed = int(sum(_span(self.vals[name]) for name in instruction.writes) * updates.workspace_copies)
                self._need(instruction.workspace >= needed, f"{node.name} needs {needed} bytes of workspace")
        for name, tensor in zip(instruction.writes, outputs, strict=True):
            self._write(name, tensor, place)

    def _by_name(self, node: fx.Node, operands: list[Tensor]) -> Sequence[Tensor]:
        names = node.meta.get("names", ())
        if node.target is convert:
            return operands  # writing them to their slots casts them
        if node.target is gradient_norms:
            return (torch.stack([_norm(grad) for grad in operands]),)
        if node.target is gradient_scale:
            return (_scale(dict(zip(names, torch.cat(operands), strict=True))),)
        count, scales = len(names), operands[2 * len(names) :]
        scale = scales[0] if scales else None
        for name, grad in zip(names, operands[count : 2 * count], strict=True):
            param = self.weights[name]  # as an optimizer does, by its own reference
            param.copy_(_new_version(name, param, grad, scale))
        return operands[:count]

    def _write(self, name: str, tensor: Tensor, place: str) -> None:
        buffer = self.schedule.buffers[name]
        if buffer.version_of:
            self.tensors[name], self.places[name] = self.tensors[buffer.version_of], self.places[buffer.version_of]
            self._declared(name, _span(tensor))
        elif buffer.kind == "pooled":
            own = tensor.clone() if any(tensor is other for other in self.tensors.values()) else tensor
            self.tensors[name], self.places[name] = own, place
            self._declared(name, own.untyped_storage().nbytes() if own.numel() else 0)
            if not buffer.returned:
                self.held[name] = own.untyped_storage().nbytes()
        else:
            self._need(self.places[name] == place, f"{name} is written elsewhere than it is")
            self.tensors[name].copy_(tensor)

    def _fits(self, instruction: Any) -> None:
        """The bytes that are really held never exceed the peak that is enforced."""
        held = sum(self.held.values()) + self.arenas["device"].numel() + self.schedule.resident_nbytes.get("device", 0)
        if instruction.op == "run" and instruction.queue == "compute" and instruction.kernel not in self.nodes:
            held += self.subject.given.workspace(self.step.get_submodule(instruction.kernel))
        peak = self.schedule.peak_nbytes.get("device", 0)
        self._need(held <= peak, f"{held} bytes are held on the device, the peak is {peak}")

    # what leaves

    def _leaving(self, kinds: tuple[str, ...]) -> Results:
        results: Results = {}
        for spec, value in self._outputs():
            if spec.kind in kinds:
                buffer = self.schedule.buffers[value.name]
                place = "device" if spec.kind == "output" else self.tiers[spec.index]
                self._need(self.places.get(value.name) == place, f"{spec.kind} {spec.name} leaves elsewhere than on {place}")
                leaves = buffer.returned or buffer.kind == "home"
                self._need(leaves, f"{spec.kind} {spec.name} does not leave")
                results[spec.kind, spec.name] = self.tensors[value.name].clone()
        return results
