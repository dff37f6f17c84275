"""Calls of equal modules are traced once: the graph is the one of tracing each, and what is not equal is traced."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mtcompile
from mtcompile import torch_private
from mtcompile.torch_private import Copies

LAYERS, WIDTH = 6, 8
RANKS = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
EXPERTS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
pytestmark = pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="only torch 2.13 copies calls")


class Layer(nn.Module):
    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.number, self.scale = number, 1.5

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, layer: Callable[[int], nn.Module] = Layer, layers: int = LAYERS) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer(number) for number in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def captured(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Asserts that the graph is that of tracing each module. Returns how many calls were copied."""
    (copied, copies), (whole, _) = (_captured(copy.deepcopy(model), Copies(allowed), args, kwargs) for allowed in (True, False))
    assert _text(copied) == _text(whole)
    return copies.made


def _captured(model: nn.Module, copies: Copies, args: Any, kwargs: Any) -> tuple[torch.fx.GraphModule, Copies]:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.manual_seed(0)
    running(model, backend, copies)(*args, **kwargs)
    return graphs[0], copies


def running(model: nn.Module, backend: Any, copies: Copies) -> Callable[..., Any]:
    """The model captured by Dynamo alone."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args, **kwargs: model(*args, **kwargs), backend=backend, fullgraph=True, dynamic=False)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch_private.capture_settings(32), torch_private.copying_equal_modules(copies):
            return compiled(*args, **kwargs)

    return call


def _text(module: torch.fx.GraphModule) -> list[Any]:
    """All of a graph that anyone reads: what is computed, where in the code and in which module, and what describes tensors."""
    storages = dict[int, int]()

    def about(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [about(item) for item in value]
        if not isinstance(value, Tensor):
            return repr(value)
        storage = storages.setdefault(torch_private.storage_id(value), len(storages))
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.requires_grad, value._version, storage

    numbers = {node: number for number, node in enumerate(module.graph.nodes)}

    def node_text(node: torch.fx.Node) -> Any:
        modules = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        where = modules, node.meta.get("stack_trace"), [what for _, what in node.meta.get("source_fn_stack", ())]
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda operand: f"node {numbers[operand]}")  # type: ignore
        what = node.op, re.sub(r"_\d+$", "", node.name), str(node.target), repr(arguments)
        return *what, about(node.meta.get("example_value")), *where, getattr(node.meta.get("grapharg"), "source", None)

    return [node_text(node) for node in module.graph.nodes]


def x() -> Tensor:
    return torch.randn(4, WIDTH)


# ------------------------------------------------------------------------------------------------------------ what is copied


def test_equal_layers_are_traced_once() -> None:
    assert captured(Stack(), x()) == LAYERS - 1


def test_copies_of_a_layer_are_equal() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    assert captured(nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False), torch.randn(2, 4, WIDTH)) == LAYERS - 2


def test_results_may_be_views_and_tuples() -> None:
    class Pair(Layer):
        def forward(self, x: Tensor, other: tuple[Tensor, Tensor]) -> Any:  # type: ignore[override]
            left, right = super().forward(x + other[0]).chunk(2, -1)
            return torch.cat((right, left), -1), (left, other[1], x.unsqueeze(0))

    class Pairs(Stack):
        def forward(self, x: Tensor) -> Tensor:
            total = x.sum()
            for layer in self.layers:
                x, (left, _, view) = layer(x, (x * 2, total))
                total = total + left.sum() + view[0].mean()
            return total

    assert captured(Pairs(Pair), x()) == LAYERS - 2  # from the second on: what the first gets is an input


def test_experts_are_copied() -> None:
    class Experts(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([layer(x) * share for layer, share in zip(self.layers, x[0], strict=False)]).mean()

    assert captured(Experts(), x()) == LAYERS - 1


class Writing(Layer):
    """Writes to memory of its own."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        both = y.new_empty(2 * y.shape[0], WIDTH)
        both[: y.shape[0]].copy_(y)
        both[y.shape[0] :].copy_(x)
        order = y.sum(-1).argsort()
        places = torch.empty_like(order)
        places[order] = torch.arange(y.shape[0])
        share = both.sum(-1, keepdim=True)
        share /= 2
        return (both * share).mean(0).tanh() + torch.zeros_like(y).scatter_(1, places[:, None] % WIDTH, 1)


def test_layers_that_write_to_their_own_memory_are_copied() -> None:
    assert captured(Stack(Writing), x()) == LAYERS - 1


@pytest.mark.parametrize(
    ("kind", "sizes", "copies"),
    (
        ("Llama", {}, 3),
        ("Llama", {"attention_dropout": 0.1}, 3),
        ("Gemma3Text", {"layer_types": ["full_attention", "sliding_attention"] * 2, "head_dim": 8}, 2),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}, 3),
        ("DeepseekV3", {**RANKS, **EXPERTS, "first_k_dense_replace": 0}, 3),
        ("Cohere2", {"layer_types": ["full_attention", "sliding_attention"] * 2}, 2),
    ),
)
def test_layers_of_transformers_are_copied_by_kind(kind: str, sizes: dict[str, Any], copies: int) -> None:
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "use_cache": False}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**{**common, **heads, **sizes})
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
    tokens = torch.randint(1, 64, (2, 8))
    assert captured(model, input_ids=tokens, labels=tokens) >= copies


# -------------------------------------------------------------------------------------------------------- what is not equal


class Numbered(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.number + 1)


class NumberedInDict(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (getattr(self, "num" + "ber") + 1)


class Scaled(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.scale = 1 / (number + 1) ** 0.5


class Rates(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.drop = nn.Dropout(0.1 * number)


class Chosen(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if any(self is each for each in CHOSEN) else 1)


class ChosenAmong(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self in CHOSEN else 1)


class ChosenByHash(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self in {each: 1 for each in CHOSEN} else 1)


class Sliding(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.kind = "sliding" if number % 2 else "full"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.tanh() if self.kind == "sliding" else x)


class Closure(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.act = lambda x: x * (number + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))  # type: ignore[no-any-return]


class InDict(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.config = {"number": [number]}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.config["number"][0])


class Counting(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return super().forward(x) + self.seen


class Storing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


class InPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return super().forward(x)


class DetachedInPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x.detach().mul_(2)
        return super().forward(x)


class ResultInPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mul_(2)


class Nested(Layer):
    """Experts are numbered alike in each layer but the fourth."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Numbered(expert if number != 3 else 2 * expert) for expert in (1, 1, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = expert(x)
        return super().forward(x)


def test_modules_within_equal_ones_are_compared() -> None:
    assert captured(Stack(Nested), x()) >= LAYERS - 2  # and some experts of the first layer and the fourth


TABLE: dict[int, float] = {}
CHOSEN: list[nn.Module] = []


class Registered(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * TABLE[id(self)]


IN_PLACE = InPlace, DetachedInPlace, ResultInPlace


@pytest.mark.parametrize("layer", (Numbered, NumberedInDict, Scaled, Rates, Closure, InDict, Counting, Storing, *IN_PLACE))
def test_layers_that_differ_are_traced(layer: Callable[[int], nn.Module]) -> None:
    assert captured(Stack(layer), x()) == 0


def test_one_layer_of_each_kind_is_traced() -> None:
    assert captured(Stack(Sliding), x()) == LAYERS - 2


@pytest.mark.parametrize("layer", (Registered, Chosen, ChosenAmong, ChosenByHash))
@pytest.mark.parametrize("chosen", (0, 3))
def test_layers_found_by_identity_are_traced(layer: Callable[[int], nn.Module], chosen: int) -> None:
    model = Stack(layer)
    TABLE.update({id(each): number + 1.0 for number, each in enumerate(model.layers)})
    CHOSEN[:] = [model.layers[chosen]]
    try:
        (graph, copies), (whole, _) = (_captured(model, Copies(allowed), (x(),), {}) for allowed in (True, False))
    finally:
        TABLE.clear()
        CHOSEN.clear()
    assert _text(graph) == _text(whole) and copies.made == 0


def _hooked(model: Stack) -> None:
    model.layers[3].register_forward_hook(lambda module, args, result: result * 2)


def _tied(model: Stack) -> None:
    model.layers[3].up.weight = model.layers[1].up.weight


def _shared(model: Stack) -> None:
    model.layers[3].up = model.layers[1].up


def _frozen(model: Stack) -> None:
    model.layers[3].requires_grad_(False)


def _patched(model: Stack) -> None:
    layer = model.layers[3]
    layer.forward = lambda x: Layer.forward(layer, x) * 2


def _tied_to_stem(model: Stack) -> None:
    model.layers[0].up.weight = model.stem.weight


def _evaluating(model: Stack) -> None:
    model.layers[3].eval()


def _ordered(model: Stack) -> None:
    model.layers[3].norm = nn.LayerNorm(WIDTH, eps=1e-3)


def _strided(model: Stack) -> None:
    model.layers[3].up.weight = nn.Parameter(model.layers[3].up.weight.detach().t())


@pytest.mark.parametrize("change", (_hooked, _tied, _shared, _frozen, _patched, _tied_to_stem, _evaluating, _ordered, _strided))
def test_a_layer_that_differs_is_traced(change: Callable[[Stack], None]) -> None:
    model = Stack()
    change(model)
    assert captured(model, x()) < LAYERS - 1


class Twice(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers[::-1], *self.layers):
            x = layer(x)
        return x.mean()


class Collected(Stack):
    def forward(self, x: Tensor) -> Any:
        every = []
        for layer in self.layers:
            x = layer(x)
            every.append(x)
        return x.mean(), every


class Assigned(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            layer.scale = float(number)
            x = layer(x)
        return x.mean()


class AssignedBefore(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            layer.scale = float(number)
        return super().forward(x)


class Cast(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            with torch.autocast("cpu", torch.bfloat16, enabled=number % 2 == 0):
                x = layer(x)
        return x.float().mean()


class WithoutGrad(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            with torch.set_grad_enabled(number > 3):
                x = layer(x)
        return x.mean()


class Changed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).add_(1)
        return x.mean()


class Constants(Stack):
    def __init__(self) -> None:
        super().__init__(Given)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, number / 2)
        return x.mean()


class Given(Layer):
    def forward(self, x: Tensor, factor: float) -> Tensor:  # type: ignore[override]
        return super().forward(x) * factor


class Widths(Stack):
    """Layers of any width: only the shape of what they get differs."""

    def __init__(self) -> None:
        super().__init__(lambda number: Rows())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(torch.cat((x, x[:1])))
        return x.mean()


class Rows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * x.shape[0]).tanh() + x.mean()


class Flags(Stack):
    """What a layer does depends on values of a buffer of its own."""

    def __init__(self) -> None:
        super().__init__(Flagged)


class Flagged(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.register_buffer("odd", torch.tensor(number % 2 == 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).where(self.odd, x)


@pytest.mark.parametrize("model", (Twice, Collected, Assigned, AssignedBefore, Cast, WithoutGrad, Constants, Widths, Flags))
def test_what_lies_between_layers_is_as_it_is(model: Callable[[], nn.Module]) -> None:
    captured(model(), x())


@pytest.mark.parametrize("model", (Assigned, AssignedBefore, Cast, Changed, Constants, Widths))
def test_layers_called_otherwise_are_traced(model: Callable[[], nn.Module]) -> None:
    assert captured(model(), x()) == 0


def test_layers_in_checkpoints_are_traced() -> None:
    class Checkpointed(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x.mean()

    assert captured(Checkpointed(), x()) == 0


# --------------------------------------------------------------------------------------------------------- what changes later


def _scaled_later(model: Stack) -> None:
    model.layers[5].scale = 2.0


def _dropout_later(model: Stack) -> None:
    model.layers[4].drop.p = 0.0


def _epsilon_later(model: Stack) -> None:
    model.layers[5].norm.eps = 0.5


def _doubled_later(model: Stack) -> None:
    model.layers[3].double()
    model.layers[3].register_forward_pre_hook(lambda module, args: (args[0].double(),))
    model.layers[3].register_forward_hook(lambda module, args, result: result.float())


def _replaced_later(model: Stack) -> None:
    model.layers[3].up = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def _tied_later(model: Stack) -> None:
    model.layers[5].up.weight = model.layers[2].up.weight


def _shorter_later(model: Stack) -> None:
    del model.layers[4]


def _swapped_later(model: Stack) -> None:
    model.layers[1], model.layers[4] = model.layers[4], model.layers[1]


@pytest.mark.parametrize(
    "change",
    (
        *(_scaled_later, _dropout_later, _epsilon_later, _doubled_later, _replaced_later, _tied_later, _shorter_later),
        *(_swapped_later, _hooked, _frozen, _patched, _evaluating, _strided),
    ),
)
def test_a_later_change_of_one_layer_shows(change: Callable[[Stack], None]) -> None:
    model, twin = Stack(), Stack()
    twin.load_state_dict(model.state_dict())
    copies = Copies()
    call = running(model, lambda graph, inputs: graph, copies)
    for step in range(2):
        value = x()
        results = []
        for each, function in ((model, call), (twin, twin)):
            torch.manual_seed(step)
            loss = function(value)
            each.zero_grad()
            loss.backward()
            results.append((loss.detach(), [p.grad for p in each.parameters()]))
        (loss, gradients), (expected, expected_gradients) = results
        assert copies.made >= LAYERS - 1 and torch.equal(loss, expected)
        for one, other in zip(gradients, expected_gradients, strict=True):
            assert (one is None) == (other is None) and (one is None or torch.equal(one, other))
        if step == 0:
            torch.manual_seed(1)
            change(model)
            torch.manual_seed(1)
            change(twin)


# ------------------------------------------------------------------------------------------------------------ whole steps


@pytest.mark.parametrize("layer", (Layer, Numbered, Rates, Counting, Writing))
def test_a_step_has_the_bits_of_a_plain_one(layer: Callable[[int], nn.Module]) -> None:
    model = Stack(layer)
    twin = copy.deepcopy(model)
    made = mtcompile.compile(model, memory="1GiB")
    for step in range(2):
        value = x()
        results = []
        for each in (made, twin):
            torch.manual_seed(step)
            loss = each(value)
            loss.backward()
            results.append((loss.detach(), [p.grad for p in each.parameters()]))
        assert torch.equal(results[0][0], results[1][0])
        assert all(map(torch.equal, results[0][1], results[1][1]))
