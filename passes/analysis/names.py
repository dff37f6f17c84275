"""Names of a step's values for a reader: the module that makes a value, and the operation that it results from."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping

from torch import fx

from mtcompile.passes.step_graph import body_outputs, inputs_of, kernel_of, outputs_of, regions, results, source

_WORDS = {"grad": "gradient of ", "mutation": "new ", "update": "updated ", "output": "output "}
_WHEN = {"forward": "", "backward": " of the backward"}


def value_names(step: fx.GraphModule) -> Mapping[str, str]:
    """Returns value -> its name for a reader, such as ``layers.3.mlp/silu``: of inputs and outputs, the user's own. Of several
    results of the same operation in a module, the second is ``layers.3.mlp/silu#2``. ``step``: before any rewrite or after.
    After rewrites, the names also apply to the values of its schedule's buffers."""
    names = {node.name: spec.name for spec, node in inputs_of(step)}
    given = {source(value).name: f"{_WORDS[spec.kind]}{spec.name}" for spec, value in outputs_of(step)}
    counts, operations = Counter[str](), dict[str, list[str]]()
    for region in regions(step):
        target = str(region.target)
        if target not in operations:
            operations[target] = [_operation(node) for node in body_outputs(kernel_of(step, region))]
        for value in results(region):
            origin = value.meta.get("origin", value.name)
            if origin in names:
                names[value.name] = f"{names[origin]}, again"
                continue
            place = value.meta.get("module_path") or step.meta["blocks"][region.meta["block"]]
            name, when = f"{place}/{operations[target][int(value.args[1])]}", _WHEN[region.meta["phase"]]
            counts[name + when] += 1
            number = f"#{counts[name + when]}" if counts[name + when] > 1 else ""
            names[origin] = given.get(value.name, f"{name}{number}{when}")
    return {**given, **names}


def _operation(result: fx.Node) -> str:
    """The name of the operation that makes a body's result."""
    while result.target is operator.getitem:
        result = result.all_input_nodes[0]
    name = str(result.target) if hasattr(result.target, "_schema") else getattr(result.target, "__name__", result.name)
    return name.removeprefix("aten.").partition(".")[0].strip("_")
