"""The contract of the private torch APIs in ``mtcompile.torch_private``: each is asked for exactly what we use. That their
names exist is in tests/torch_private/test_contract.py.

A new torch that fails here tells what moved, before any model does.
"""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import mtcompile
from mtcompile import torch_private
from mtcompile.capture.description import Description, describe
from mtcompile.capture.dynamo import front_end
from mtcompile.capture.joint import joint_graph
from mtcompile.capture.outputs import Computed
from mtcompile.capture.program_key import program_key
from mtcompile.errors import CaptureError
from mtcompile.passes.joint.normalize import normalize
from mtcompile.passes.step_graph import InputSpec, OutputSpec


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor, int]:
        for layer in self.layers:
            x = layer(x) * scale
        x = self.norm(x)
        return x.sum(), x, 3


def captured(*args: Any) -> tuple[nn.Module, Description]:
    model, descriptions = Buffered(), []
    names = {id(b): ("buffer", n) for n, b in model.named_buffers()} | {
        id(p): ("param", n) for n, p in model.named_parameters()
    }

    def backend(graph: Any, inputs: Any) -> Any:
        descriptions.append(describe(graph, inputs, lambda tensor: names.get(id(tensor))))
        return graph.forward

    def call(*inputs: Any) -> Any:
        return model(*inputs)

    torch.compiler.reset()
    front_end(call, backend)(*args)
    return model, descriptions[0]


def test_dynamo_lifts_parameters_and_makes_numbers_constants() -> None:
    model, description = captured(torch.randn(3, 4), 0.5)
    roles = [(spec.role, spec.name) for spec in description.inputs]
    assert {n for role, n in roles if role == "param"} == {n for n, _ in model.named_parameters()}
    assert {n for role, n in roles if role == "buffer"} == {n for n, _ in model.named_buffers()}
    assert [role for role, _ in roles].count("input") == 1  # x, and no scale
    assert not any(isinstance(v, torch.SymInt) for n in description.graph.graph.nodes for v in _shape(n))
    assert {type(o) for o in description.outputs} == {Computed}


def _shape(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("example_value")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def test_the_joint_export_describes_its_inputs_and_outputs() -> None:
    model, description = captured(torch.randn(3, 4), 0.5)
    joint = joint_graph(description, (True, False))
    assert all(isinstance(spec, InputSpec) for spec in joint.meta["inputs"])
    assert all(isinstance(spec, OutputSpec) for spec in joint.meta["outputs"])
    kinds = [(spec.kind, spec.name) for spec in joint.meta["outputs"]]
    assert {n for kind, n in kinds if kind == "grad"} == {n for n, _ in model.named_parameters()}
    assert {n for kind, n in kinds if kind == "mutation"} == {n for n, _ in model.named_buffers()}
    assert [spec.role for spec in joint.meta["inputs"]].count("tangent") == 1  # the detached output has none
    paths = {node.meta["module_path"] for node in joint.graph.nodes if node.meta.get("module_path")}
    assert {"layers.0", "layers.1", "norm"} <= paths
    backward = [n for n in joint.graph.nodes if n.meta.get("partitioner_tag") == "is_backward"]
    assert backward, "the joint graph tags its backward nodes"
    assert normalize(joint).graph.output_node() is not None


def test_an_inference_graph_has_no_backward() -> None:
    _, description = captured(torch.randn(3, 4), 0.5)
    joint = joint_graph(description, None)
    assert {spec.kind for spec in joint.meta["outputs"]} <= {"output", "mutation"}


@pytest.mark.parametrize("keep", [False, True])
def test_keeps_graph_tells_a_retained_backward(keep: bool) -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(torch_private.keeps_graph()))
    (x * 2).sum().backward(retain_graph=keep)
    assert seen == [keep]


def test_storage_holders_counts_views() -> None:
    tensor = torch.ones(8)
    alone = torch_private.storage_holders(tensor)
    view = tensor[2:]
    assert torch_private.storage_holders(tensor) == alone + 1
    del view
    assert torch_private.storage_holders(tensor) == alone


def test_the_allocators_events_see_what_an_operation_makes_inside() -> None:
    x = torch.ones(1024)
    with torch_private.cpu_allocator_peak() as peak:
        y = (x + x) * x  # the sum and the product are alive together
    assert peak.nbytes == 2 * 4096
    del y
    with torch_private.cpu_allocator_peak() as peak:
        for _ in range(200):
            torch.empty(16)
    assert peak.nbytes == 64
    with torch.profiler.profile(), torch_private.cpu_allocator_peak() as peak:
        torch.empty(16)
    assert peak.nbytes is None  # another profiler is active


def test_an_error_of_dynamos_tells_its_cause() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def backend(graph: Any, inputs: Any) -> Any:
        raise CaptureError("not this one")

    with pytest.raises(Exception, match="not this one") as caught:
        torch.compile(forward, backend=backend, fullgraph=True)(torch.ones(2))
    assert isinstance(torch_private.cause_in_dynamo(caught.value), CaptureError)
    assert torch_private.cause_in_dynamo(ValueError()) is None


def test_a_forward_that_a_library_has_replaced_leaves_the_names_of_modules() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers(x).relu())  # type: ignore[no-any-return]

    model: Any = mtcompile.compile(Head(), memory="1MiB", device="cpu")
    plain = model.forward
    model.forward = types.MethodType(lambda self, x: plain(x).square(), model)
    model(torch.randn(2, 4)).sum().backward()
    assert "closure" not in str(model.schedule)


def test_two_programs_have_one_key_only_if_they_are_traced_alike() -> None:
    _, description = captured(torch.randn(3, 4), 0.5)
    _, other = captured(torch.randn(3, 4), 0.25)
    key = program_key(description, (True, False))
    assert key is not None and key == program_key(description, (True, False))
    assert key != program_key(description, None) and key != program_key(other, (True, False))


@pytest.mark.filterwarnings("error:the forward is compiled in parts")
def test_hidden_states_and_attentions_of_transformers_part_nothing() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attn_implementation="eager"))
    compiled = mtcompile.compile(copy.deepcopy(plain), memory="1GiB")
    tokens, seen = torch.randint(0, 50, (2, 8)), list[list[torch.Tensor]]()
    for model in (plain, compiled):
        out = model(tokens, labels=tokens, output_hidden_states=True, output_attentions=True)
        (out.loss + sum(hidden.square().mean() for hidden in out.hidden_states)).backward()
        seen.append([out.loss, *out.hidden_states, *out.attentions, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *seen))


def test_attributes_that_a_forward_assigns_around_a_hook_are_all_kept() -> None:
    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            self.before = h.detach() + 1
            h.register_hook(lambda gradient: gradient * 0.5)
            self.after = x * 3
            return h.square().mean()

    torch.manual_seed(0)
    plain = Noting()
    ours = mtcompile.compile(copy.deepcopy(plain), memory="1MiB", device="cpu")
    x = torch.randn(2, 4)
    for model in (plain, ours):
        model(x).backward()
    assert torch.equal(plain.before, ours.before) and torch.equal(plain.after, ours.after)
    assert torch.equal(plain.linear.weight.grad, ours.linear.weight.grad)
