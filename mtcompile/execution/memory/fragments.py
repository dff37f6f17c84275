"""Parameters whose steps take them in fragments: the fragments of their memory, their homes, state and gradients.

A parameter has one home, one gradient and one state, whole as in plain PyTorch; a step reads and makes rows of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from mtcompile.passes.step_graph import InputSpec, OutputSpec, fragments_of
from mtcompile.runtime.devices.rows import named_rows, places_of
from mtcompile.runtime.schedule import aligned


def tensor_of(spec: InputSpec, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the tensor of an input of a step among those of its program: all of it, the rows of a fragment, or places."""
    if (places := spec.places) is not None:
        named = named_rows([inputs[index] for index in places.among], places.rows)
        return places_of(inputs[places.index], named, places.without, places.spare)
    part = spec.fragment
    return inputs[spec.index].detach() if part is None else inputs[part.index].detach()[part.start : part.end]


def index_of(spec: InputSpec) -> int:
    """Returns the position among a program's inputs of what an input is, or is a fragment of."""
    if spec.places is not None:
        return spec.places.index
    return spec.index if spec.fragment is None else spec.fragment.index


def parameter_homes(step: fx.GraphModule) -> dict[str, str]:
    """Returns the home block of each parameter of a step, by the name of the whole parameter."""
    fragments = fragments_of(step)
    return {fragments[name].parameter if name in fragments else name: home for name, home in step.meta["homes"].items()}


def homes_off_device(step: fx.GraphModule) -> dict[str, str]:
    """Returns the tier, the host, of the homes of parameters that a step takes in fragments, or of which it takes rows: on the
    device they would be there whole."""
    homes = step.meta["homes"]
    return {homes[name]: "host" for name in (*fragments_of(step), *step.meta["rows"]) if name in homes}


def with_fragments(names: Collection[str] | None, joint: fx.GraphModule) -> frozenset[str] | None:
    """Returns the names of parameters, and those of their fragments in a step."""
    if names is None:
        return None
    return frozenset(names).union(name for name, part in fragments_of(joint).items() if part.parameter in names)


def updated_by(step: fx.GraphModule) -> frozenset[str]:
    """Returns the names of the whole parameters that a step's backward updates: those of the optimizer that have a gradient."""
    return _results(step, "update")


def left_by(step: fx.GraphModule) -> frozenset[str]:
    """Returns the names of the whole parameters whose gradients a step's backward leaves in ``.grad``."""
    return _results(step, "grad")


def _results(step: fx.GraphModule, kind: str) -> frozenset[str]:
    parts, names = fragments_of(step), (spec.name for spec in step.meta["outputs"] if spec.kind == kind)
    return frozenset(parts[name].parameter if name in parts else name for name in names)


def without_fragments(step: fx.GraphModule) -> frozenset[str]:
    """Returns the names of the optimizer's parameters as a step was planned, without those of fragments."""
    return frozenset(step.meta.get("updated") or ()).difference(fragments_of(step))


def state_with_fragments(state: Mapping[str, int], step: fx.GraphModule) -> dict[str, int]:
    """Returns the bytes of optimizer state by parameter, and by fragment its share."""
    parts, rows = fragments_of(step), dict[str, int]()
    for part in parts.values():
        rows[part.parameter] = max(rows.get(part.parameter, 0), part.end)
    shares = {
        name: aligned(-(-state.get(part.parameter, 0) * (part.end - part.start) // rows[part.parameter]))
        for name, part in parts.items()
    }
    return {**state, **shares}


Inputs = Sequence[tuple[InputSpec, str]]  # of a step, each with the name of its value
Outputs = Sequence[tuple[OutputSpec, str]]


def gradients_in_order(inputs: Inputs, outputs: Outputs) -> list[tuple[int, int, str]]:
    """Returns the gradients that the backward of a step makes: (the input, the first of its rows, the value). Those of one
    input's fragments follow each other, as they lie in memory."""
    parts = {spec.index: spec.fragment for spec, _ in inputs if spec.fragment is not None}
    gradients: list[tuple[int, int, str]] = []
    for spec, name in outputs:
        if spec.kind == "grad":
            part = parts.get(spec.index)
            gradients.append((spec.index, 0, name) if part is None else (part.index, part.start, name))
    order = {index: place for place, (index, _, _) in reversed([*enumerate(gradients)])}
    return sorted(gradients, key=lambda gradient: (order[gradient[0]], gradient[1]))


def joined_gradients(inputs: Inputs, outputs: Outputs, tensors: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Returns the gradients that a backward has made, by input. Those of fragments lie side by side, where they are one
    tensor."""
    gradients: dict[int, torch.Tensor] = {}
    for index, start, name in gradients_in_order(inputs, outputs):
        gradient = tensors[name]
        if start:
            whole = gradients[index]
            assert gradient.data_ptr() == whole.data_ptr() + whole.nbytes, f"{name} is not behind the rows before {start}"
            gradient = whole.as_strided((start + len(gradient), *gradient.shape[1:]), gradient.stride())
        gradients[index] = gradient
    return gradients
