"""Training loops as people write them, with the objects of torch itself: each is run plainly and compiled, at the smallest
budget that works, and must give the same bits."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler, swa_utils

import mtcompile
from tests.helpers.training import minimum_bytes


@pytest.fixture(scope="module", autouse=True)
def plans_are_searched_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """These tests compile the same few models again and again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MT_CACHE", str(tmp_path_factory.mktemp("plans")))
        yield


# --------------------------------------------------------------------------------------------------------------- models


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.drop = nn.Dropout(0.15)  # 1 / 0.85 is not what 1 divided by it is, in float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Net(nn.Module):
    """A small transformer with dropout, statistics in buffers, and a part that is used when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList([Block()])
        self.statistics, self.extra, self.head = nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 20)
        self.use_extra = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.statistics(x.flatten(0, 1))
        if self.use_extra:
            x = x + torch.tanh(self.extra(x))
        return F.cross_entropy(self.head(x), tokens.flatten())


class Mlp(nn.Module):
    """As small as can be: two layers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(12, 12), nn.Linear(12, 12), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.tanh(self.first(x)))).square().mean()


def tokens(batch: int = 4, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 20, (batch, 6), generator=torch.Generator().manual_seed(seed))


def floats(seed: int = 1) -> torch.Tensor:
    return torch.randn(5, 12, generator=torch.Generator().manual_seed(seed))


INPUTS: dict[type[nn.Module], dict[str, torch.Tensor]] = {Net: {"tokens": tokens()}, Mlp: {"x": floats()}}


def built(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind().train()


@functools.cache
def least(kind: type[nn.Module]) -> int:
    """The smallest budget for a model and its inputs."""
    with torch.random.fork_rng():
        return minimum_bytes(built(kind), INPUTS[kind])


def test_the_budget_of_these_tests_is_well_under_the_resident_plan() -> None:
    for kind in INPUTS:
        resident = mtcompile.compile(built(kind), device="cpu")
        resident(**INPUTS[kind])
        assert least(kind) < 0.8 * resident.memory_report()["planned_peak_device_bytes"]


# ------------------------------------------------------------------------------------------------- plainly and compiled

Seen = list[Any]
Compile = Callable[..., Any]
Story = Callable[[Any, Compile, Seen], None]


def same_bits(story: Story, kind: type[nn.Module] = Net, memory: int | None = None) -> Any:
    """Tell ``story`` twice: with a model that stays plain, and with one that ``compiled`` compiles when the story says so.
    What it puts into ``seen`` must be equal, and so must weights, gradients, buffers and the generator at its end.
    Returns the compiled model."""
    logs: list[Seen] = []
    models: list[Any] = []

    def compile_it(model: nn.Module, optimizer: Any = None) -> Any:
        return mtcompile.compile(model, memory=memory or least(kind), optimizer=optimizer, device="cpu")

    least(kind)
    for compiled in (lambda model, optimizer=None: model, compile_it):
        model, seen = built(kind), []
        torch.manual_seed(7)
        story(model, compiled, seen)
        look(model, seen)
        seen.append(torch.get_rng_state())
        logs.append(seen)
        models.append(model)
    equal(logs[0], logs[1])
    assert isinstance(models[1], mtcompile.api.CompiledModule)
    return models[1]


def equal(one: Any, other: Any, where: str = "seen") -> None:
    assert type(one) is type(other), f"{where}: {type(one)} and {type(other)}"
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            equal(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other)):
            equal(a, b, f"{where}[{index}]")
    else:
        assert one == other, f"{where}: {one!r} and {other!r}"


def look(model: nn.Module, seen: Seen) -> None:
    """Put a copy of weights, gradients and buffers into ``seen``."""
    seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
    seen.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})
    seen.append({name: b.clone() for name, b in model.named_buffers()})


def step(model: Any, optimizer: Any, seen: Seen, **data: torch.Tensor) -> torch.Tensor:
    loss = model(**(data or INPUTS[Net if isinstance(model, Net) else Mlp]))
    loss.backward()
    seen.append(loss.detach().clone())
    look(model, seen)
    optimizer.step()
    look(model, seen)
    optimizer.zero_grad()
    return loss.detach()


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **{"lr": 1e-2, **options})


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


# ----------------------------------------------------------------------------------------------------------- schedulers


def _sequential(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def _chained(optimizer: Any) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.ChainedScheduler(parts, optimizer=optimizer)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.2, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.2, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.6),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=6),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4, 2.0),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.7**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "SequentialLR": _sequential,
    "ChainedScheduler": _chained,
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01, anneal_epochs=3),
}
NO_SCHEDULERS = {"LRScheduler": "the base class of the others"}


def test_every_scheduler_of_torch_is_tested_or_excepted() -> None:
    modules = (lr_scheduler, swa_utils)
    classes = {n for m in modules for n, c in vars(m).items() if inspect.isclass(c) and issubclass(c, lr_scheduler.LRScheduler)}
    classes = {name for name in classes if not name.startswith("_")}
    assert classes == SCHEDULERS.keys() | NO_SCHEDULERS.keys()


@pytest.mark.parametrize(
    ("name", "attached"),
    [*((name, "before") for name in SCHEDULERS), *((name, "after") for name in ("OneCycleLR", "StepLR", "SequentialLR"))],
)
def test_schedulers(name: str, attached: str) -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = sgd(model.parameters())
        scheduler = SCHEDULERS[name](optimizer) if attached == "before" else None
        model = compiled(model, optimizer)
        scheduler = scheduler or SCHEDULERS[name](optimizer)
        for _ in range(5):
            loss = step(model, optimizer, seen)
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(loss)
            else:
                scheduler.step()
            seen.append([{k: group[k] for k in ("lr", "momentum")} for group in optimizer.param_groups])
        assert len({row[0]["lr"] for row in seen if isinstance(row, list)}) > 1

    same_bits(story, Mlp)


def test_a_scheduler_attached_before_the_optimizer_is_bound() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        model = compiled(model)
        optimizer = adamw(model.parameters())
        scheduler = lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=6)
        if hasattr(model, "bind"):
            model.bind(optimizer)
        for _ in range(5):
            step(model, optimizer, seen)
            scheduler.step()
            seen.append([optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]])

    same_bits(story)


# ----------------------------------------------------------------------------------------------------------- optimizers

# What each class needs to make a visible step on these models.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adadelta": {"lr": 1.0},
    "Adafactor": {"lr": 0.05},
    "Adagrad": {"lr": 0.05},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "ASGD": {"lr": 0.05},
    "LBFGS": {"lr": 0.1, "max_iter": 3},
    "Muon": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 0.01},
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
}
NO_OPTIMIZERS = {
    "Optimizer": "the base class of the others",
    "SparseAdam": "it takes sparse gradients only, which compiled steps do not make: test_sparse_gradients_are_refused",
}


def test_every_optimizer_of_torch_is_tested_or_excepted() -> None:
    classes = {n for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)}
    assert classes == OPTIMIZERS.keys() | NO_OPTIMIZERS.keys()


def _variants(name: str) -> list[dict[str, Any]]:
    """Default, one parameter at a time, many at once, fused: what the class has."""
    accepted = inspect.signature(getattr(torch.optim, name)).parameters
    return [{}, *({key: value} for key, value in (("foreach", False), ("foreach", True), ("fused", True)) if key in accepted)]


VARIANTS = [(name, variant) for name in OPTIMIZERS for variant in _variants(name)]


@pytest.mark.parametrize("name, variant", VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "default")
def test_optimizers(name: str, variant: dict[str, Any]) -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        parameters = [p for p in model.parameters() if p.dim() == 2 or name != "Muon"]  # Muon is for matrices
        optimizer = getattr(torch.optim, name)(parameters, **OPTIMIZERS[name], **variant)
        model = compiled(model, optimizer)

        def closure() -> torch.Tensor:
            model.zero_grad()
            loss = model(**INPUTS[Mlp])
            loss.backward()
            return loss

        for _ in range(2):
            before = [p.detach().clone() for p in parameters]
            if name == "LBFGS":
                seen.append(optimizer.step(closure).detach())
            else:
                step(model, optimizer, seen)
            assert not any(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
            model.zero_grad()
        seen.append([dict(state) for state in optimizer.state.values()])

    same_bits(story, Mlp)


def test_a_learning_rate_in_a_tensor() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters(), lr=torch.tensor(0.01), foreach=False)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        model = compiled(model, optimizer)
        for _ in range(3):
            step(model, optimizer, seen)
            scheduler.step()
            seen.append(optimizer.param_groups[0]["lr"].clone())

    same_bits(story, Mlp)


def test_lbfgs_with_a_line_search() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
        model = compiled(model, optimizer)
        model.eval()  # a line search asks for one function, without dropout

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(**INPUTS[Mlp])
            loss.backward()
            return loss

        for _ in range(3):
            seen.append(optimizer.step(closure).detach())
            look(model, seen)

    same_bits(story, Mlp)


def test_closures() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters())
        model = compiled(model, optimizer)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(**INPUTS[Net])
            loss.backward()
            return loss

        for _ in range(3):
            seen.append(optimizer.step(closure).detach())
            look(model, seen)

    same_bits(story)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16, sparse=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.embed(words).square().mean()


def test_sparse_gradients_are_refused() -> None:
    model = mtcompile.compile(Bag(), memory="1MiB", device="cpu")
    with pytest.raises(mtcompile.CaptureError, match="sparse"):
        model(tokens())


# ------------------------------------------------------------------------------- groups, freezing, parameters left alone


def test_groups_with_hyper_parameters_of_their_own() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        groups = [
            {"params": model.embed.parameters(), "lr": 0.1, "weight_decay": 0.0},
            {"params": model.blocks.parameters(), "betas": (0.8, 0.9)},
            {"params": [*model.statistics.parameters(), *model.extra.parameters()], "amsgrad": True},
            {"params": model.head.parameters(), "lr": 1e-3, "maximize": True},
        ]
        optimizer = adamw(groups)
        model = compiled(model, optimizer)
        for index in range(4):
            step(model, optimizer, seen)
            optimizer.param_groups[index]["lr"] *= 0.5

    same_bits(story)


def test_a_group_added_in_the_middle_of_training() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.head.parameters())
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        model = compiled(model, optimizer)
        for index in range(4):
            step(model, optimizer, seen)
            model.zero_grad()  # parameters that no group has receive gradients too
            if index == 0:
                scheduler.step()
            if index == 1:
                optimizer.add_param_group({"params": model.blocks.parameters(), "lr": 0.03})

    same_bits(story)


def test_parameters_frozen_and_unfrozen() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        model.first.requires_grad_(False)
        optimizer = adamw(model.parameters())
        model = compiled(model, optimizer)
        for change in ((), (model.first,), (model.second,), (), (model.first, model.second)):
            for module in change:
                module.requires_grad_(not module.weight.requires_grad)
            step(model, optimizer, seen)

    same_bits(story, Mlp, least(Mlp) + 2048)  # what is trained later needs a little more than what was trained first


def test_a_new_layer_thawed_with_a_group_of_its_own() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        model.first.requires_grad_(False)
        optimizer = adamw(model.second.parameters())
        model = compiled(model, optimizer)
        step(model, optimizer, seen)
        model.first.requires_grad_(True)
        optimizer.add_param_group({"params": model.first.parameters(), "lr": 1e-3})
        for _ in range(2):
            step(model, optimizer, seen)

    same_bits(story, Mlp, least(Mlp) + 2048)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_parameter_without_a_gradient_in_some_steps(to_none: bool) -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters())
        model = compiled(model, optimizer)
        for used in (True, False, False, True):
            model.use_extra = used
            loss = model(**INPUTS[Net])
            loss.backward()
            look(model, seen)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            look(model, seen)

    same_bits(story)


# ------------------------------------------------------------------------------------- clipping, scaling, accumulation


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_clipping_by_norm(order: float, foreach: bool | None) -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters())
        model = compiled(model, optimizer)
        for _ in range(3):
            model(**INPUTS[Net]).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=order, foreach=foreach)
            seen.append(norm)
            look(model, seen)
            optimizer.step()
            optimizer.zero_grad()

    same_bits(story)


def test_clipping_by_value_and_total_norm() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters())
        model = compiled(model, optimizer)
        for _ in range(3):
            model(**INPUTS[Net]).backward()
            seen.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            look(model, seen)
            optimizer.step()
            optimizer.zero_grad()

    same_bits(story)


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_skips_a_step_that_overflowed(fused: bool) -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters(), fused=fused)
        model = compiled(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for index in range(5):
            before = model.head.weight.detach().clone()
            loss = model(**INPUTS[Net]) * (float("inf") if index == 1 else 1.0)
            scaler.scale(loss).backward()
            if index % 2:
                scaler.unscale_(optimizer)
                seen.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).nan_to_num())
            scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.get_scale())
            assert torch.equal(before, model.head.weight) == (index == 1)
            optimizer.zero_grad()
            look(model, seen)
        assert len({entry for entry in seen if isinstance(entry, float)}) > 1

    same_bits(story)


@pytest.mark.parametrize("to_none", [True, False])
def test_accumulation_over_micro_batches(to_none: bool) -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters())
        model = compiled(model, optimizer)
        for index in range(3):
            for part in range(4):
                (model(tokens=tokens(seed=10 * index + part)) / 4).backward()
                look(model, seen)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)

    same_bits(story)


def test_gradients_kept_read_and_set_by_hand() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters())
        model = compiled(model, optimizer)
        kept = []
        for index in range(4):
            weight = model.head.weight
            if index == 1:  # before the backward, which adds to it
                weight.grad = torch.ones_like(weight)
            model(**INPUTS[Net]).backward()
            kept.append([p.grad for p in model.parameters()])
            if index == 2:
                weight.grad = weight.grad.sign() * 0.1
                model.extra.weight.grad = None
                model.extra.bias.grad.mul_(-1.0)
            look(model, seen)
            optimizer.step()
            optimizer.zero_grad()
        seen.extend(kept)

    same_bits(story)


def test_a_step_from_gradients_that_autograd_returned() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters())
        model = compiled(model, optimizer)
        for _ in range(3):
            chosen = [*model.blocks.parameters(), model.head.weight]
            found = torch.autograd.grad(model(**INPUTS[Net]), chosen)
            seen.append(list(found))
            for p, g in zip(chosen, found, strict=True):
                p.grad = g * 0.5
            optimizer.step()
            optimizer.zero_grad()
            look(model, seen)

    same_bits(story)


# --------------------------------------------------------------------------------------------------------- checkpoints


def through_torch(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_safetensors(state: Any) -> Any:
    from safetensors.torch import load, save

    return load(save(state))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("into", ["plain", "compiled", "same"])
def test_training_goes_on_from_a_checkpoint(into: str, fused: bool) -> None:
    """A run that is saved after two steps and goes on in another pair of model and optimizer, or in the same."""

    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters(), fused=fused)
        model = compiled(model, optimizer)
        for _ in range(2):
            step(model, optimizer, seen)
        saved = through_torch({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        seen.append(saved)
        if into == "same":
            step(model, optimizer, [])
        else:
            model = Net()
            optimizer = adamw(model.parameters(), fused=fused)
            if into == "compiled":
                model = compiled(model, optimizer)
        seen.append(str(model.load_state_dict(saved["model"])))
        optimizer.load_state_dict(saved["optimizer"])
        torch.manual_seed(9)
        for _ in range(2):
            step(model, optimizer, seen)

    same_bits(story)


def test_a_plain_run_goes_on_compiled() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters())
        for _ in range(2):
            step(model, optimizer, seen)
        model(**INPUTS[Net]).backward()  # gradients that are waiting for a step
        model = compiled(model, optimizer)
        optimizer.step()
        for _ in range(2):
            step(model, optimizer, seen)

    same_bits(story)


def test_safetensors_and_assigned_weights() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters())
        model = compiled(model, optimizer)
        step(model, optimizer, seen)
        saved = through_safetensors(model.state_dict())
        seen.append(dict(sorted(saved.items())))
        step(model, optimizer, seen)
        model.load_state_dict(saved)
        step(model, optimizer, seen)
        model.load_state_dict({name: value.clone() for name, value in saved.items()}, assign=True)
        optimizer = adamw(model.parameters())
        if hasattr(model, "bind"):
            model.bind(optimizer)
        step(model, optimizer, seen)

    same_bits(story)


def test_a_saved_parameter_takes_its_own_bytes() -> None:
    """Of a module's few weights as well: their neighbours at home are not written with them."""
    model = built(Net)
    plain = io.BytesIO()
    torch.save(model.blocks[0].norm.state_dict(), plain)
    compiled = mtcompile.compile(model, memory=least(Net), device="cpu")
    compiled(**INPUTS[Net]).backward()
    file = io.BytesIO()
    torch.save(compiled.blocks[0].norm.state_dict(), file)
    assert len(file.getvalue()) <= len(plain.getvalue()) + 1024


def test_a_copy_of_model_and_optimizer_goes_its_own_way() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters())
        model = compiled(model, optimizer)
        step(model, optimizer, seen)
        other, its = copy.deepcopy((model, optimizer))
        assert type(other) is Net
        state = torch.get_rng_state()
        step(other, its, seen)
        torch.set_rng_state(state)
        step(model, optimizer, seen)
        look(other, seen)

    same_bits(story)


def test_a_copy_between_forward_and_backward() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters())
        model = compiled(model, optimizer)
        for _ in range(2):
            loss = model(**INPUTS[Net])
            other = copy.deepcopy(model)
            loss.backward()
            look(other, seen)
            optimizer.step()
            look(model, seen)
            optimizer.zero_grad()

    same_bits(story)


# ---------------------------------------------------------------------------------------------------------------- hooks


def test_hooks_on_parameters() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        early = model.head.weight.register_hook(lambda g: g * 2)
        calls: list[str] = []

        def tripled(p: torch.Tensor) -> None:
            p.grad.mul_(3)

        optimizer = adamw(model.parameters())
        model = compiled(model, optimizer)
        step(model, optimizer, seen)
        model.embed.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
        model.extra.weight.register_hook(lambda g: calls.append("none returned"))
        model.extra.bias.register_post_accumulate_grad_hook(tripled)
        step(model, optimizer, seen)
        early.remove()
        step(model, optimizer, seen)
        seen.append(calls)

    same_bits(story)


def test_a_step_per_parameter_inside_backward() -> None:
    """PyTorch's recipe for optimizers that run as gradients arrive."""

    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizers = {p: adamw([p]) for p in model.parameters()}

        def update(p: torch.Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        model = compiled(model)
        for _ in range(3):
            loss = model(**INPUTS[Net])
            loss.backward()
            seen.append(loss.detach())
            look(model, seen)

    same_bits(story)


def test_hooks_on_optimizers() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters())
        calls: list[str] = []

        def before(_: Any, args: Any, kwargs: Any) -> None:
            calls.append("before")
            for p in model.parameters():
                p.grad.add_(0.01)

        optimizer.register_step_pre_hook(before)
        model = compiled(model, optimizer)
        optimizer.register_step_post_hook(lambda *_: calls.append(f"after {float(model.head.bias.detach().sum())}"))
        for _ in range(3):
            step(model, optimizer, seen)
        seen.append(calls)

    same_bits(story)


@pytest.mark.long
def test_forward_hooks_and_hooks_on_the_loss() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters())
        model.extra.register_forward_hook(lambda module, args, output: output * 2)
        model.head.register_forward_pre_hook(lambda module, args: (args[0] + 1.0,))
        model.register_forward_hook(lambda module, args, output: output * 3)
        model = compiled(model, optimizer)
        step(model, optimizer, seen)
        handle = model.blocks[0].register_forward_hook(lambda module, args, output: output * 0.5)
        for _ in range(2):
            loss = model(**INPUTS[Net])
            loss.register_hook(lambda g: g * 0.5)
            loss.backward()
            look(model, seen)
            optimizer.step()
            optimizer.zero_grad()
            handle.remove()

    same_bits(story, memory=least(Net) + 8192)


def test_backward_hooks_of_modules_are_refused_until_they_are_gone() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters())
        model = compiled(model, optimizer)
        step(model, optimizer, seen)
        handle = model.extra.register_full_backward_hook(lambda module, into, out: (into[0] * 2,))
        if hasattr(model, "plan"):
            with pytest.raises(mtcompile.CaptureError, match="remove the module's backward hooks"):
                model(**INPUTS[Net])
        handle.remove()
        step(model, optimizer, seen)

    same_bits(story)


# ------------------------------------------------------------------------------- averages, evaluation, modes and sizes


@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("use_buffers", [False, True])
def test_averages_of_weights(made: str, use_buffers: bool) -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        def averaged() -> Any:
            rule = swa_utils.get_ema_multi_avg_fn(0.7)
            return swa_utils.AveragedModel(model, multi_avg_fn=rule, use_buffers=use_buffers)

        optimizer = adamw(model.parameters())
        average = averaged() if made == "before" else None
        model = compiled(model, optimizer)
        average = average or averaged()
        for _ in range(3):
            step(model, optimizer, seen)
            average.update_parameters(model)
            look(average, seen)
        swa_utils.update_bn([INPUTS[Net]["tokens"]], average)
        average.eval()
        with torch.no_grad():
            seen.append(average(**INPUTS[Net]))
        look(average, seen)
        model.load_state_dict(average.module.state_dict())
        step(model, optimizer, seen)

    same_bits(story)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps(guard: Any) -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters())
        model = compiled(model, optimizer)
        for index in range(3):
            step(model, optimizer, seen)
            model.eval()
            with guard():
                seen.append(model(tokens(3, seed=index)).clone())
            look(model, seen)
            model.train()
        model.eval()
        with guard():
            seen.append(model(tokens(3)).clone())

    same_bits(story)


@pytest.mark.long
def test_evaluation_under_inference_mode_comes_first() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters())
        model = compiled(model, optimizer)
        with torch.inference_mode():
            seen.append(model(**INPUTS[Net]).clone())
        for _ in range(2):
            step(model, optimizer, seen)

    same_bits(story)


@pytest.mark.long
def test_training_in_evaluation_mode_and_parts_of_it() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters())
        model = compiled(model, optimizer)
        for change in (model.eval, model.train, model.statistics.eval, model.train):
            change()
            step(model, optimizer, seen)

    same_bits(story)


@pytest.mark.long
def test_autocast_around_the_forward() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters())
        model = compiled(model, optimizer)
        for index in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16) if index != 2 else contextlib.nullcontext():
                loss = model(**INPUTS[Net])
            loss.backward()
            seen.append(loss.detach())
            look(model, seen)
            optimizer.step()
            optimizer.zero_grad()

    same_bits(story, memory=least(Net) + 16384)


@pytest.mark.long
def test_batches_of_changing_size() -> None:
    def story(model: Any, compiled: Compile, seen: Seen) -> None:
        optimizer = adamw(model.parameters())
        model = compiled(model, optimizer)
        for size in (4, 2, 1, 4):
            step(model, optimizer, seen, tokens=tokens(size, seed=size))

    same_bits(story)
