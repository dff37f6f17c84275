"""Writes and reads joint graphs, kernels' bodies and whole step graphs as JSON text, with the shapes of every value but no
tensor's content.

A graph is ``{"format", "nodes", "kernels"}``. A node is ``{"op", "name", "target", "args", "kwargs", "meta"}``; operands and
torch's enumerations are objects of one key (``{"node": "mm_1"}``, ``{"dtype": "float32"}``), tuples ``{"tuple": [...]}``; a
value is its dtype, size, strides, offset and the bytes of its storage. ``kernels`` are the graphs that regions call.

``fx`` puts names and targets into Python source and runs it, so text that becomes a graph could become code. Therefore names
are identifiers, the kinds of nodes and the fields of ``meta`` are listed here, and operators are those of ATen, prims and this
package, without those that open files.
"""

from __future__ import annotations

import functools
import json
import keyword
import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import fx

from mtcompile.passes.analysis.kernels import kernel_key
from mtcompile.passes.analysis.rows import Rows
from mtcompile.passes.generators import replay, save_rng
from mtcompile.passes.lazy_graph import LazyGraphModule
from mtcompile.passes.step_graph import (
    TIER_OF_MOVE,
    Fragment,
    InputSpec,
    OutputSpec,
    Places,
    new_node,
    ranks_of,
    restride,
)

FORMAT = "mtcompile-graph-1"
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (operator.getitem, save_rng, replay, restride, *TIER_OF_MOVE)
}
_Operator: Any = type(torch.ops.aten.add.Tensor)
_ENUMERATIONS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
_OPS = ("placeholder", "call_function", "call_module", "output")
NAMESPACES = ("aten", "prims", "mtcompile")
_OPENS_FILES = "filename"  # a parameter of operators that open a file: aten.from_file
_META = ("phase", "block", "role", "tier", "nbytes", "name", "key", "rng_state", "rng_device", "early")
_META += ("seq_nr", "module_path", "starts_block")  # what says which block a call is in
SMALL = 64  # elements of a constant that is written, or compared
_DTYPES_OF_CONSTANTS = (torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def in_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets graphs call a function, by its name; returns it. For one whose arguments hold graphs of this format themselves."""
    _FUNCTIONS[function.__name__] = function
    return function


class GraphFormatError(ValueError):
    """Raised for text that is not a graph of this format, and for a graph that the format has no words for."""


def graph_to_json(graph: fx.GraphModule, whole: bool = False) -> str:
    """A joint graph, a kernel's body, or a step graph with its kernels, as text. ``whole``: with the user's lines that each
    node was traced from, and with its constants, which must be small. Raises GraphFormatError."""
    data = _graph(graph)
    if whole:
        data["places"] = [node.meta.get("stack_trace") for node in graph.graph.nodes]
        data["constants"] = {name: _constant(value) for name, value in graph.meta.get("constants", {}).items()}
    return json.dumps(data)


def graph_from_json(text: str) -> fx.GraphModule:
    """The graph that ``graph_to_json`` wrote; values are tensors without content (device ``meta``). Raises GraphFormatError."""
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise GraphFormatError(f"expected a graph of format {FORMAT!r}")
        return _module(data)
    except GraphFormatError:
        raise
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError, RuntimeError) as error:  # RecursionError too
        raise GraphFormatError(f"a field is missing or of the wrong type: {error!r}") from None


# --------------------------------------------------------------------------------------------------------------- writing


def _graph(module: fx.GraphModule) -> dict[str, Any]:
    nodes = [
        {
            "op": node.op,
            "name": node.name,
            "target": _target(node.target) if node.op == "call_function" else str(node.target),
            "args": _encoded(node.args),
            "kwargs": {key: _encoded(value) for key, value in node.kwargs.items()},
            "meta": _meta(node.meta),
        }
        for node in module.graph.nodes
    ]
    step = {
        "inputs": [asdict(spec) for spec in module.meta.get("inputs", ())],
        "outputs": [asdict(spec) for spec in module.meta.get("outputs", ())],
        "blocks": list(module.meta.get("blocks", ())),
        "device": module.meta.get("device", ""),
        "told": list(module.meta.get("told", ())),
        "unordered": list(module.meta.get("unordered", ())),
        "is_part": module.meta.get("is_part", False),
        "homes": dict(module.meta.get("homes", {})),
        "sliced": list(module.meta.get("sliced", ())),
        "rows": {name: asdict(rows) for name, rows in module.meta.get("rows", {}).items()},
        "ranks": ranks_of(module),
        "hosts": module.meta.get("hosts", 1),
    }
    kernels = {name: _graph(kernel) for name, kernel in module.named_children() if isinstance(kernel, fx.GraphModule)}
    return {"format": FORMAT, "name": module.meta.get("name", ""), "nodes": nodes, "kernels": kernels, "step": step}


def _target(target: Any) -> str:
    name = getattr(target, "__name__", "")
    if _FUNCTIONS.get(name) is target:
        return str(name)
    if isinstance(target, _Operator) and _allowed(target):
        return str(target)
    raise GraphFormatError(f"expected an operator of torch.ops or of the step graph, found {target!r}")


def _encoded(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, (list, tuple)):
        items = [_encoded(item) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, _Operator):
        return {"operator": str(value)}
    for kind, type_ in _ENUMERATIONS.items():
        if isinstance(value, type_):
            return {kind: str(value).removeprefix("torch.")}
    raise GraphFormatError(f"expected an argument of ATen, found {value!r}")


def _meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    written = {key: meta[key] for key in _META if key in meta}
    return {**written, "val": _value(meta["val"])} if "val" in meta else written


def _value(val: Any) -> Any:
    if isinstance(val, torch.Tensor):
        dtype = str(val.dtype).removeprefix("torch.")
        nbytes = val.untyped_storage().nbytes()
        return [dtype, list(val.shape), list(val.stride()), int(val.storage_offset()), int(nbytes)]
    if isinstance(val, (tuple, list)):
        return {"tuple": [_value(item) for item in val]}
    return {"scalar": val if isinstance(val, (bool, int, float, type(None))) else None}


def _constant(value: torch.Tensor) -> list[Any]:
    plain = type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided
    if not plain or not value.is_contiguous() or value.numel() > SMALL or value.dtype not in _DTYPES_OF_CONSTANTS:
        raise GraphFormatError("expected only small constants")
    return [str(value.dtype).removeprefix("torch."), list(value.shape), value.reshape(-1).tolist()]


# --------------------------------------------------------------------------------------------------------------- reading


def _module(data: Mapping[str, Any]) -> fx.GraphModule:
    owner = torch.nn.Module()
    for name, kernel in data["kernels"].items():
        owner.add_module(_identifier(name), _module(kernel))
    graph = fx.Graph()
    env: dict[str, fx.Node] = {}
    tensors: dict[str, Any] = {}  # equal values are one tensor, which no pass changes: there are few, and making one takes long
    for row in data["nodes"]:
        op, target = row["op"], row["target"]
        if op not in _OPS:
            raise GraphFormatError(f"expected a node that is one of {', '.join(_OPS)}, found {op!r}")
        if op == "call_function":
            target = _FUNCTIONS[target] if target in _FUNCTIONS else _operator(target)
        elif op == "call_module" and target not in data["kernels"]:
            raise GraphFormatError(f"expected a call of one of the graph's kernels, found {target!r}")
        else:
            _identifier(target)
        args = _decoded(row["args"], env)
        kwargs = {_identifier(key): _decoded(value, env) for key, value in row["kwargs"].items()}
        node = new_node(graph, op, target, args, kwargs, _identifier(row["name"]))
        node.meta = {key: value for key, value in row["meta"].items() if key in _META}
        if "val" in row["meta"]:
            about = repr(row["meta"]["val"])
            if about not in tensors:
                tensors[about] = _tensors(row["meta"]["val"])
            node.meta["val"] = tensors[about]
        env[row["name"]] = node
    for node, place in zip(graph.nodes, data.get("places", ())):
        if place is not None:
            node.meta["stack_trace"] = str(place)
    module = LazyGraphModule(owner, graph, class_name=_identifier(data["name"] or "Step"))
    if data["step"]["device"]:  # a kernel has none; a part of a forward may have no inputs
        module.meta.update(
            inputs=tuple(_input_spec(row) for row in data["step"]["inputs"]),
            outputs=tuple(OutputSpec(**row) for row in data["step"]["outputs"]),
            blocks=tuple(data["step"]["blocks"]),
            device=data["step"]["device"],
            told=tuple(data["step"].get("told", ())),
            unordered=tuple(data["step"].get("unordered", ())),
            is_part=data["step"].get("is_part", False),
            homes=data["step"]["homes"],
            sliced=tuple(data["step"].get("sliced", ())),
            rows={name: _rows(row) for name, row in data["step"].get("rows", {}).items()},
            ranks=data["step"].get("ranks", 1),
            hosts=data["step"].get("hosts", 1),
            constants={name: _tensor(*content) for name, content in data.get("constants", {}).items()},
            kernels={kernel.meta["key"]: kernel for _, kernel in module.named_children()},
            memo={},
        )
    else:
        module.meta.update(name=data["name"], key=kernel_key(graph))
    return module


def _rows(row: Mapping[str, Any]) -> Rows:
    return Rows(**{**row, "indices": tuple(row["indices"])})


def _input_spec(row: Mapping[str, Any]) -> InputSpec:
    fragment, places = row.get("fragment"), row.get("places")
    part = None if fragment is None else Fragment(**fragment)
    those = None if places is None else Places(**{**places, "among": tuple(places["among"])})
    return InputSpec(**{**row, "fragment": part, "places": those})


def _identifier(name: str) -> str:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise GraphFormatError(f"expected a Python identifier, found {name!r}")
    return name


@functools.cache
def _operator(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    overloads = getattr(getattr(torch.ops, namespace), packet) if namespace in NAMESPACES else None
    overloaded = getattr(overloads, overload, None)
    if not isinstance(overloaded, _Operator) or not _allowed(overloaded):
        raise GraphFormatError(f"expected an operator of {', '.join(NAMESPACES)} that opens no file, found {name!r}")
    return overloaded


@functools.cache
def _allowed(overloaded: Any) -> bool:
    return overloaded.namespace in NAMESPACES and all(a.name != _OPENS_FILES for a in overloaded._schema.arguments)


def _decoded(value: Any, env: Mapping[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, env) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(_decoded(item, env) for item in content)
    if kind == "node":
        return env[content]
    if kind == "device":
        return torch.device(content)
    if kind == "complex":
        return complex(*content)
    if kind == "operator":
        return _operator(content)
    member = getattr(torch, content, None)
    if not isinstance(member, _ENUMERATIONS[kind]):
        raise GraphFormatError(f"expected a {kind}, found {content!r}")
    return member


def _tensor(dtype: str, shape: list[int], values: list[Any]) -> torch.Tensor:
    (kind,) = (kind for kind in _DTYPES_OF_CONSTANTS if str(kind) == f"torch.{dtype}")
    return torch.tensor(values, dtype=kind, device="cpu").reshape(shape)


def _tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(_tensors(item) for item in value["tuple"]) if "tuple" in value else value["scalar"]
    name, size, stride, offset, nbytes = value
    dtype = getattr(torch, name)
    whole = torch.empty(nbytes // dtype.itemsize, dtype=dtype, device="meta")
    return whole.as_strided(size, stride, offset)
