"""Proves that a joint graph whose weights are cut into fragments computes what the whole one does.

A fragment is rows of its weight, and what comes back for it is the same rows of the gradient; the rules are those of ``parts``
and, for products of groups of rows, of ``grouped``. A sum in parts is the whole sum only where the cut may split sums.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from mtcompile.passes.inputs import Fragment
from mtcompile.passes.proof.cuts.grouped import Groups
from mtcompile.passes.proof.cuts.numbering import check_computed
from mtcompile.passes.proof.same_computation import expect
from mtcompile.passes.step_graph import InputSpec, OutputSpec


def check_fragments(whole: fx.GraphModule, cut: fx.GraphModule, splits: bool) -> None:
    """Raises SameComputationError unless ``cut`` computes the results of ``whole``. The gradient of a weight in fragments
    is in the same fragments. ``splits``: sums may be computed in parts."""
    numbers = Groups(splits)
    inputs, results = numbers.uncut(whole)
    parts: dict[int, list[InputSpec]] = {}
    for spec in cut.meta["inputs"]:
        if spec.fragment is not None:
            parts.setdefault(spec.fragment.index, []).append(spec)
    params = {spec.index: spec for spec in inputs if spec.role == "param"}
    for index, fragments in parts.items():
        expect(index in params, lambda f=fragments: f"fragments of parameters, found {f[0]}")
        weight = params[index]
        (number, (layout, strides)), gradient, end = inputs.pop(weight), OutputSpec("grad", index, weight.name), 0
        for spec in fragments:
            start, end = end, spec.fragment.end if spec.fragment is not None else 0
            whole_spec = replace(spec, name=weight.name, index=index, fragment=None)
            follows = spec.fragment == Fragment(weight.name, index, start, end) and whole_spec == weight
            follows = follows and start < end <= layout.shape[0]
            expect(follows, lambda s=spec, w=weight.name, a=start: f"rows of {w} from {a} on, found {s}")
            inputs[spec] = numbers.part(0, number, start, end), (layout.along(0, end - start), strides)
            if gradient in results:
                made, node = results[gradient]
                results[OutputSpec("grad", spec.index, spec.name)] = numbers.part(0, made, start, end), node
        expect(end == layout.shape[0], lambda w=weight, e=end: f"all rows of {w.name}, found {e}")
        results.pop(gradient, None)
    check_computed(numbers, whole, cut, inputs, results)
