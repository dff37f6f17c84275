"""The content of a checkpoint: the state of a training between two steps."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mtcompile.api import plain_class
from mtcompile.checkpoint.adapters import adapter_config, base_is_apart, base_of, is_of_base, names_in_file
from mtcompile.checkpoint.encoding import Storable, encoded, storable
from mtcompile.checkpoint.files import MANIFEST, checkpoints, may_be_added
from mtcompile.checkpoint.generators import generator_states
from mtcompile.checkpoint.provenance import provenance
from mtcompile.checkpoint.shards import INDEX
from mtcompile.checkpoint.signatures import SIGNATURE
from mtcompile.errors import CheckpointError, StepError
from mtcompile.optim.state_sizes import state_nbytes
from mtcompile.references import with_hooks
from mtcompile.torch_private import UsedGradient

_EXTRA_STATE = "_extra_state"  # torch's name
_HALF_LOADED = "_mt_half_loaded"  # of a plain model: hooks that refuse it


@dataclass(frozen=True, slots=True)
class Content:
    """All that a checkpoint of ``step`` is to hold; of a rank that is not the first, its random generators alone.
    ``tied``: name -> the parameter that it shares all of its memory with. ``tensors``: those of ``state``, by their numbers.
    ``files``: further files as bytes by name, config.json among them. ``key``: signs it, if there is one. ``own``: what
    ``own_checkpoints`` returns, the only ones that may be deleted."""

    step: int
    keep: int
    weights: Mapping[str, Storable]
    tied: Mapping[str, str]
    tensors: Mapping[str, Storable]
    state: Mapping[str, Any]
    files: Mapping[str, bytes]
    own: set[str]
    rank: int = 0
    key: Any = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.weights.values(), *self.tensors.values()))

    def copied(self) -> Content:
        """Returns the same content in host memory of its own."""
        weights = {name: _copy(tensor) for name, tensor in self.weights.items()}
        return replace(self, weights=weights, tensors={name: _copy(tensor) for name, tensor in self.tensors.items()})

    def with_files(self, files: Mapping[str, bytes], key: Any) -> Content:
        """Returns the same content with the caller's files and key. Raises ValueError for a name that they cannot have."""
        for name, data in files.items():
            if not isinstance(data, bytes):
                raise TypeError(f"expected files= to have bytes, found {type(data).__name__} for {name!r}: encode text")
            if name in (MANIFEST, SIGNATURE, "config.json") or name.endswith(INDEX) or not may_be_added(name):
                raise ValueError(
                    f"expected files= to have names of their own that end in .json, .jinja, .txt or .model, found {name!r}"
                )
        return replace(self, files={**self.files, **files}, key=key)


def _copy(tensor: Storable) -> Tensor:
    return tensor.detach().to("cpu", copy=True) if isinstance(tensor, Tensor) else tensor.values().cpu()


@dataclass(frozen=True, slots=True)
class Moment:
    """The state beside the model and its optimizer, as it was at the end of a step. ``tensors``: of ``others`` and
    ``extra``; ``generators``: as ``generator_states`` gives them. If they may have changed since: ``buffers`` of the model and
    what its modules save beside tensors (``module_states``), by name, and ``groups`` of the optimizer, as they were then."""

    step: int
    others: Any
    extra: Any
    tensors: tuple[Storable, ...]
    generators: Mapping[str, Any]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    module_states: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[Mapping[str, Any], ...] | None = None


def moment(step: int, others: Mapping[str, Any] | None, extra: Mapping[str, Any] | None) -> Moment:
    """Returns what there is now. Warns of ``others`` without state. Raises ValueError and TypeError as ``save`` does."""
    if type(step) is not int or not 0 <= step < 10**12:
        raise ValueError(f"expected step to be a whole number of 0 or more, found {step!r}")
    tensors: list[Storable] = []
    states = {name: other.state_dict() for name, other in with_state(others).items()}
    saved = encoded(states, tensors, "others"), encoded(dict(extra or {}), tensors, "extra")
    return Moment(step, *saved, tuple(tensors), generator_states())


def with_state(others: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns those of ``others`` that have a state to save and load. Warns of the others."""
    stateful = {}
    for name, other in (others or {}).items():
        if callable(getattr(other, "state_dict", None)) and callable(getattr(other, "load_state_dict", None)):
            stateful[name] = other
        else:
            warnings.warn(
                f"{name} is a {type(other).__name__} without state_dict() and load_state_dict(): its position in the data is "
                "not saved, so a resumed training sees other data. Use a loader with state, such as torchdata's "
                "StatefulDataLoader, or save the position in extra= and skip to it",
                stacklevel=4,
            )
    return stateful


def content_of(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    now: Moment,
    keep: int,
    gradients: bool = True,
) -> Content:
    """Returns what to save: tensors of the model and of the states, not copies. ``gradients``: also those that there are.
    Raises as ``save`` does."""
    if type(keep) is not int or keep < 0:
        raise ValueError(f"expected keep to be a whole number of 0 or more, found {keep!r}")
    if os.path.lexists(folder / MANIFEST):
        raise CheckpointError(f"{folder} is itself a checkpoint; expected a folder that holds checkpoints")
    if _HALF_LOADED in model.__dict__:
        refuse_half_loaded(model)
    if any(compiled.between_backward_and_step for compiled in _compiled(model)):
        raise CheckpointError(
            'update="backward" has updated the parameters, and optimizer.step() has not ended the step; save after it'
        )
    if rank := rank_of(model):
        own: list[Storable] = []
        generators = encoded(now.generators, own, "generators")
        numbered = {str(number): tensor for number, tensor in enumerate(own)}
        state = {"model": encoded({}, own, "model"), "generators": generators}
        return Content(now.step, keep, {}, {}, numbered, state, {}, own_checkpoints(model, folder), rank)
    weights, others_of_model, tied = _weights(model)
    weights.update({name: buffer for name, buffer in now.buffers.items() if name in weights})
    for name, state in now.module_states.items():
        (weights if isinstance(state, Tensor) else others_of_model)[name] = state
    adapter: dict[str, str] = {}
    if base_is_apart(model):
        (weights, adapter), tied = _apart(model, weights, others_of_model), {}
    tensors = list(now.tensors)
    with contextlib.ExitStack() as stack:
        for compiled in _compiled(model):
            if compiled.door.masters is not None:
                stack.enter_context(compiled.door.masters.joining_later())
        optimizer_state = None if optimizer is None else optimizer.state_dict()
    if optimizer_state is not None and now.groups is not None:
        if [len(group["params"]) for group in optimizer_state["param_groups"]] != [len(g["params"]) for g in now.groups]:
            raise CheckpointError("the optimizer's groups have other parameters now; save after the next step")
        pairs = zip(optimizer_state["param_groups"], now.groups, strict=True)
        optimizer_state = {**optimizer_state, "param_groups": [{**then, "params": group["params"]} for group, then in pairs]}
    parts: dict[str, Any] = {
        "model": others_of_model,
        "optimizer": optimizer_state,
        "names": None if optimizer is None else optimized_names(model, optimizer),
        "gradients": dict(_gradients(model)) if gradients else {},
        "generators": now.generators,
        "provenance": provenance(model),
        **({"adapter": adapter} if adapter else {}),
    }
    state = {name: encoded(part, tensors, name) for name, part in parts.items()} | {"others": now.others, "extra": now.extra}
    numbered = {str(number): tensor for number, tensor in enumerate(tensors)}
    return Content(now.step, keep, weights, tied, numbered, state, _configuration(model), own_checkpoints(model, folder))


def _apart(
    model: nn.Module, weights: dict[str, Storable], others: dict[str, Any]
) -> tuple[dict[str, Storable], dict[str, str]]:
    """Returns the weights of an adapter by their names in PEFT's file, and name -> name there. What is neither there nor in the
    frozen base, such as buffers, goes to the ``others`` of the model."""
    names, base = names_in_file(model, weights), base_of(model)
    others.update({name: value for name, value in weights.items() if name not in names and not is_of_base(name, base)})
    return {there: weights[name] for name, there in names.items()}, names


def _compiled(model: nn.Module) -> Iterator[Any]:
    """Yields what is behind each compiled module in a model."""
    for module in model.modules():
        if (compiled := getattr(module, "_mt_model", None)) is not None:
            yield compiled


def refuse_half_loaded(module: nn.Module, *_: Any) -> None:
    """Raises StepError for a plain model of which only a part was loaded: a hook of its forward."""
    raise StepError(
        "a load ended before all of the checkpoint was loaded: some weights are those of the checkpoint, others not. Load it "
        "again (checkpoint.load, or load_state_dict of the model and its optimizer) before going on"
    )


@contextlib.contextmanager
def loading_whole(model: nn.Module) -> Iterator[None]:
    """Surrounds a load. If an error or an interrupt ends it after something has changed, the model refuses to run and to be
    saved until all of it has been loaded."""
    compiled = list(_compiled(model))
    if compiled:
        with contextlib.ExitStack() as stack:
            for each in compiled:
                stack.enter_context(each.door.wholeness.loading())
            yield
        return
    before = _versions(model)
    try:
        yield
    except BaseException:
        if _versions(model) != before and _HALF_LOADED not in model.__dict__:
            hooks = (
                model.register_forward_pre_hook(refuse_half_loaded),
                model.register_load_state_dict_post_hook(_no_longer_half_loaded),
            )
            model.__dict__[_HALF_LOADED] = hooks
        raise
    _no_longer_half_loaded(model)


def _no_longer_half_loaded(model: nn.Module, keys: Any = None) -> None:
    if keys is None or not keys.missing_keys:
        for hook in model.__dict__.pop(_HALF_LOADED, ()):
            hook.remove()


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    return [(id(tensor), tensor._version) for tensor in (*model.parameters(), *model.buffers())]


def rank_of(model: nn.Module) -> int:
    """Returns this process's place among the ranks that train a compiled model; 0 for the first, or for one alone."""
    ranks = (getattr(compiled.door, "ranks", None) for compiled in _compiled(model))
    return max((joined.rank for joined in ranks if joined is not None), default=0)


def _on_several_hosts(model: nn.Module) -> list[Any]:
    """Returns the doors of compiled models of which each host has a part of the optimizer state."""
    return [compiled.door for compiled in _compiled(model) if getattr(compiled.door, "on_several_hosts", False)]


@contextlib.contextmanager
def saving_together(model: nn.Module) -> Iterator[None]:
    """Surrounds a save on each rank: from the other hosts the first rank gets, piece by piece, what it writes."""
    with contextlib.ExitStack() as stack:
        for door in _on_several_hosts(model):
            stack.enter_context(door.saving())
        yield


def saves_together(model: nn.Module) -> bool:
    """Tells whether a save needs all ranks."""
    return bool(_on_several_hosts(model))


def any_rank(model: nn.Module, flags: tuple[bool, ...]) -> tuple[bool, ...]:
    """Returns which flags are set on any rank, where a save needs all of them: they must save after the same step."""
    for door in _on_several_hosts(model):
        with door.ranks.reaching_others("to save after the same step: all ranks call after(step), as often"):
            told = door.ranks.connection.gather(sum(flag << place for place, flag in enumerate(flags)))
        flags = tuple(any(number >> place & 1 for number in told) for place in range(len(flags)))
    return flags


def folder_of_rank(folder: Path, rank: int) -> Path:
    """Returns where a rank saves what is its own alone."""
    return folder / f"rank-{rank:04d}" if rank else folder


_own: weakref.WeakKeyDictionary[nn.Module, dict[Path, set[str]]] = weakref.WeakKeyDictionary()


def own_checkpoints(model: nn.Module, folder: Path) -> set[str]:
    """Returns the names of this rank's checkpoints in a folder that the model was saved in or resumed from: a set that a save
    adds to. What is there beside them is of another training."""
    return _own.setdefault(model, {}).setdefault(folder_of_rank(folder, rank_of(model)).resolve(), set())


def resumed_from(model: nn.Module, folder: Path) -> None:
    """Notes that the training that saved into a folder goes on with this model."""
    paths = checkpoints(folder_of_rank(folder, rank_of(model)))
    own_checkpoints(model, folder).update(path.name for path, _ in paths)


def updates_in_backward(model: nn.Module) -> bool:
    """Tells whether a compiled model's backward updates parameters."""
    return any(compiled.options.updates is not None for compiled in _compiled(model))


def steps_in_backward(model: nn.Module) -> int:
    """Returns how many steps the backwards of compiled models have made, where they update parameters."""
    return sum(compiled.door.wholeness.steps for compiled in _compiled(model) if compiled.options.updates is not None)


def module_states(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields what modules save beside parameters and buffers (``get_extra_state``), by its name in the state dictionary."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{name}.{_EXTRA_STATE}".lstrip("."), module.get_extra_state()


def may_be_on_disk(model: nn.Module) -> bool:
    """Tells whether some of a model's state may be too large for memory."""
    return any(compiled.options.disk is not None for compiled in _compiled(model))


def with_masters(model: nn.Module) -> set[int]:
    """Returns the parameters, by id, that have fp32 masters. Their gradients may be fp32 too, as sums of several are."""
    masters = (compiled.door.masters for compiled in _compiled(model))
    return {key for each in masters if each is not None for key in each.trained()}


def expected_nbytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Returns the bytes that a checkpoint of this process will have after the first step: 0 for a rank but the first."""
    if rank_of(model):
        return 0
    parameters, wide = dict(nn.Module.named_parameters(model)), with_masters(model)
    apart = base_is_apart(model)
    nbytes = sum(p.nbytes for p in parameters.values() if p.requires_grad or not apart) + sum(b.nbytes for b in model.buffers())
    if optimizer is None:
        return nbytes
    masters = sum(4 * p.numel() for p in parameters.values() if id(p) in wide)
    return nbytes + masters + sum(state_nbytes(with_hooks(optimizer), parameters).values()) * (2 if masters else 1)


def optimized_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str | None]]:
    """Returns the names of an optimizer's parameters by group, in its order; None for those of other models."""
    name_of = {id(parameter): name for name, parameter in nn.Module.named_parameters(model)}
    return [[name_of.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]


def _gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields what the next backward adds to. Raises TypeError for a gradient that a file cannot hold."""
    for name, parameter in model.named_parameters():
        if (gradient := parameter.grad) is not None and not isinstance(gradient, UsedGradient):
            if gradient.layout != torch.strided:
                raise TypeError(
                    f"expected dense gradients in a checkpoint, found {gradient.layout} for {name}: save after zero_grad()"
                )
            yield name, gradient


def _weights(model: nn.Module) -> tuple[dict[str, Storable], OrderedDict[str, Any], dict[str, str]]:
    """Returns a model's tensors by name, what else its state dictionary has (versions of modules among it), and the names that
    share a tensor with an earlier one, with that."""
    state: Any = model.state_dict()
    weights: dict[str, Storable] = {}
    others: OrderedDict[str, Any] = OrderedDict()
    others._metadata = getattr(state, "_metadata", {})  # type: ignore[attr-defined]
    tied: dict[str, str] = {}
    first_of: dict[tuple[object, ...], str] = {}
    for name, value in state.items():
        if not isinstance(value, Storable):
            others[name] = value
            continue
        if name == "__metadata__":
            raise TypeError("expected another name for a tensor than __metadata__, which safetensors files use themselves")
        value = storable(value, name) if isinstance(value, Tensor) else value
        home: Any = getattr(value, "home", value)  # of what is read piece by piece
        signs = home.is_conj(), home.is_neg()
        place = home.device, home.dtype, home.data_ptr(), tuple(home.shape), home.stride(), signs
        first = first_of.setdefault(place, name) if home.numel() else name
        if first == name:
            weights[name] = value
        else:
            tied[name] = first
    return weights, others, tied


def _configuration(model: nn.Module) -> dict[str, bytes]:
    """Returns config.json of a Transformers model, with the name of the plain class, so that ``from_pretrained`` builds it;
    of an adapter alone, PEFT's configuration."""
    if base_is_apart(model):
        return adapter_config(model)
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return {}
    fields = json.loads(config.to_json_string(use_diff=False))
    fields["architectures"] = [plain_class(type(model)).__name__]
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if len(kinds) == 1:  # a precision of its own, such as masters that were split
        fields["dtype"] = str(kinds.pop()).removeprefix("torch.")
    return {"config.json": (json.dumps(fields, indent=2) + "\n").encode()}
