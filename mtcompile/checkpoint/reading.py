"""``load`` looks at every byte of a checkpoint and compares it with the model, and only then changes anything."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mtcompile.capture.refusals import first_line
from mtcompile.checkpoint.adapters import base_of, is_of_base, stem_of
from mtcompile.checkpoint.content import (
    folder_of_rank,
    loading_whole,
    may_be_on_disk,
    optimized_names,
    rank_of,
    resumed_from,
    with_masters,
    with_state,
)
from mtcompile.checkpoint.encoding import decoded
from mtcompile.checkpoint.files import MANIFEST, Manifest, checkpoints, no_checkpoint, read_manifest, verify_files
from mtcompile.checkpoint.generators import check_generator_states, set_generator_states
from mtcompile.checkpoint.saving import wait_for_saving
from mtcompile.checkpoint.shards import INDEX, mapped_tensors
from mtcompile.errors import CheckpointError, StepError
from mtcompile.optim.master_weights import MASTER, without_masters
from mtcompile.optim.training_state import numbered
from mtcompile.runtime.devices.arena import overlaps

_PARTS = ("model", "optimizer", "generators", "others", "extra")
_NOT_NEGATIVE = ("lr", "initial_lr", "eps", "weight_decay", "betas", "momentum", "alpha")
_MOST_OPTION_NUMBERS = 1000
_LIKE_PARAMETERS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum", "master")


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of ``load``. ``path``: the checkpoint's folder. ``step`` and ``extra``: as ``save`` was given them.
    ``provenance``: where the weights came from."""

    path: Path
    step: int
    extra: dict[str, Any]
    provenance: dict[str, Any] = field(default_factory=dict)


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Returns the checkpoint that was saved last into ``folder``, or ``folder`` if it is one, or None. One that is not complete
    does not count; whether its bytes are right is looked at by ``load``."""
    with contextlib.suppress(CheckpointError):
        return _opened(Path(folder))[0]
    return None


def inspect(folder: str | os.PathLike[str]) -> Loaded:
    """Returns what ``load`` would return, and loads nothing. Raises CheckpointError."""
    path, manifest = _opened(Path(folder))
    state, _ = _state(path, manifest)
    return Loaded(path, manifest.step, copy.deepcopy(state["extra"]), state.get("provenance") or {})


def saved_generators(path: Path) -> dict[str, Any]:
    """Returns the states of the random generators of a checkpoint. Raises CheckpointError."""
    return dict(_state(path, _opened(path)[1], copied=True, parts=("generators",))[0]["generators"])


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    others: Mapping[str, Any] | None = None,
    generators: bool = True,
) -> Loaded:
    """Loads a checkpoint: ``folder`` itself, or the one that was saved last into it.

    Where several ranks train, all of them call it, on one folder, and as many as there are now: weights and state are those of
    all. ``optimizer`` and ``others`` are as for ``save``. ``generators=False`` leaves the random generators alone. Gradients
    become those that were saved, or None. Call it before or after ``mtcompile.compile``, with any budget: the training goes on
    with the same bits. Raises CheckpointError if there is no checkpoint, or if it is damaged or of another model; nothing has
    changed then. If an error or Ctrl-C ends the load after something has changed, the model can be neither run nor saved
    until a load has finished.
    """
    path, manifest = _opened(Path(folder))
    verify_files(path, manifest)
    state, weights = _state(path, manifest, copied=not may_be_on_disk(model))
    base = base_of(model) if "adapter" in state else {}
    weights.update({name: value for name, value in base.items() if name not in weights})
    passed, others, others_state = set(others or {}), with_state(others), state["others"]
    with _refusing(path):
        _compare(path, model, weights, base)
        _compare_gradients(path, model, state.get("gradients") or {})
        if optimizer is not None:
            _compare_optimizer(path, optimizer, state["optimizer"])
            _compare_order(path, optimized_names(model, optimizer), state.get("names"))
            _compare_masters(path, model, state["optimizer"])
            _rehearse(optimizer, state["optimizer"])
    for name in others:
        if name not in others_state:
            known = ", ".join(sorted(map(str, others_state))) or "none"
            raise CheckpointError(f"{path}: expected a state of {name!r} among those of others, found {known}")
    if optimizer is not None and (left := sorted(map(str, others_state.keys() - passed))):
        warnings.warn(
            f"{path} also holds the state of {', '.join(left)}, which was not passed to load and starts anew: pass "
            f"others={{{left[0]!r}: ...}} as to save",
            stacklevel=2,
        )
    drawn = _generators_of_rank(path, manifest, model, state["generators"]) if generators else None
    with loading_whole(model):
        with _all_or_none(path, others, others_state):
            _load_training(path, model, weights, optimizer, state["optimizer"])
        _set_gradients(model, state.get("gradients") or {})
        if drawn is not None:  # last, and part of the load: a model that draws other numbers is not the one that was saved
            set_generator_states(drawn)
    resumed_from(model, path.absolute().parent)
    return Loaded(path, manifest.step, dict(state["extra"]), state.get("provenance") or {})


def _generators_of_rank(path: Path, manifest: Manifest, model: nn.Module, of_first: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the states of this rank's random generators when a checkpoint was saved. Warns, and returns None, where it has
    saved none, as under fewer ranks."""
    rank = rank_of(model)
    if not rank:
        return of_first
    saved = [each for each in checkpoints(folder_of_rank(path.parent, rank)) if each[1].step == manifest.step]
    if saved:
        verify_files(*saved[-1])
        return dict(_state(*saved[-1], copied=True, parts=("generators",))[0]["generators"])
    warnings.warn(
        f"rank {rank} has saved no random generators with {path.name}: it draws on as it was seeded. To save them, call save "
        "on all ranks",
        stacklevel=3,
    )
    return None


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Makes a CheckpointError of any error from looking at state that has a valid checksum and is of other types."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be used: expected state as it was saved, found {type(error).__name__}: {first_line(error)}"
        ) from error


@contextlib.contextmanager
def _all_or_none(path: Path, others: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[None]:
    """Loads the states of ``others``, whose code is not ours, before what is done inside. If either raises, all of them get the
    states that they had."""
    before: list[tuple[Any, Any]] = []
    try:
        for name, other in others.items():
            before.append((other, copy.deepcopy(other.state_dict())))
            try:
                other.load_state_dict(saved[name])
            except Exception as error:
                raise CheckpointError(
                    f"{path}: {name} refuses the state that was saved for it, {type(error).__name__}: {first_line(error)}. "
                    "Nothing has been loaded"
                ) from error
        yield
    except BaseException:
        for other, state in reversed(before):
            with contextlib.suppress(Exception):  # the first error says what is wrong
                other.load_state_dict(state)
        raise


def _load_training(
    path: Path, model: nn.Module, weights: Mapping[str, Any], optimizer: torch.optim.Optimizer | None, saved: Any
) -> None:
    """Loads model and optimizer, which have been compared with what was saved. Raises CheckpointError, with what has been
    loaded, if a hook of the user's raises."""
    loaded = "nothing, or a part of the model"
    try:
        model.load_state_dict(weights)
        loaded = "the model, and not the optimizer"
        if optimizer is not None:
            optimizer.load_state_dict(saved)
    except Exception as error:
        raise CheckpointError(
            f"expected to load all of {path}, found an error: {first_line(error)}. Loaded so far: {loaded}. Load again before "
            "you train"
        ) from error


def _set_gradients(model: nn.Module, saved: Mapping[str, Any]) -> None:
    for name, parameter in model.named_parameters():
        gradient = saved.get(name)
        parameter.grad = None
        if gradient is not None:
            if gradient.dtype != parameter.dtype:
                parameter.grad_dtype = None  # any
            parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def _opened(folder: Path) -> tuple[Path, Manifest]:
    """Returns the checkpoint that ``folder`` is or has, complete as far as sizes tell. Raises CheckpointError."""
    wait_for_saving(folder)
    if os.path.lexists(folder / MANIFEST):
        return folder, read_manifest(folder)
    complete = checkpoints(folder)
    if not complete:
        raise no_checkpoint(folder)
    return complete[-1]


def _state(
    path: Path, manifest: Manifest, copied: bool = False, parts: Collection[str] = _PARTS
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the saved state by part, and the model's state dictionary. Raises CheckpointError.

    The tensors of the state lie in its file, which may change or go, and at addresses for which some kernels round otherwise.
    ``copied``: they are copies, as an optimizer that keeps them needs; not for a model with a disk, whose state need not fit
    into memory: its updates round the same at any address, and the first step writes to the disk what belongs there."""
    try:
        tensors = _tensors(path, manifest, "state")
        saved = [tensors[str(number)] for number in range(len(tensors))]
        saved = [tensor.clone() for tensor in saved] if copied else saved
        state = {name: decoded(part, saved) for name, part in manifest.state.items()}
        if lacking := sorted(set(parts) - state.keys()):
            raise ValueError(f"expected state of {', '.join(lacking)}")
        weights: dict[str, Any] = state["model"]
        _check_versions(getattr(weights, "_metadata", {}))
        stored = _tensors(path, manifest, stem_of(state))
        weights.update({name: stored[there] for name, there in state["adapter"].items()} if "adapter" in state else stored)
        weights.update({name: weights[other] for name, other in manifest.tied.items()})
        if not all(isinstance(state.get(name, {}), dict) for name in ("others", "extra", "gradients", "provenance")):
            raise ValueError("expected others, extra, gradients and provenance to be dictionaries")
        check_generator_states(state["generators"])
    except Exception as error:  # the library that reads tensors has errors of its own
        raise CheckpointError(f"{path} cannot be used: {first_line(error)}") from error
    return state, weights


def _check_versions(modules: Any) -> None:
    """Raises ValueError unless there is a dictionary for each module of a state dictionary, with a number for its version."""
    for name, about in modules.items():
        if not isinstance(about, dict) or type(about.get("version", 1)) not in (int, type(None)):
            raise ValueError(f"expected the version of module {name!r} to be a number, found {about!r:.80}")


def _tensors(folder: Path, manifest: Manifest, stem: str) -> dict[str, Tensor]:
    """Returns the tensors of a file, or of several with an index. They are read when they are used."""
    names = [f"{stem}.safetensors"]
    if stem + INDEX in manifest.files:
        names = sorted(set(json.loads((folder / (stem + INDEX)).read_text(encoding="utf-8"))["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        if name not in manifest.files:
            raise ValueError(f"expected {name} in the manifest")
        tensors |= mapped_tensors(folder / name)
    return tensors


def _compare(path: Path, model: nn.Module, weights: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """Raises CheckpointError if the names, shapes or dtypes are not the model's. Parameters with fp32 masters take fp32.
    What a ``base`` that is not in the checkpoint has beside its parameters stays as it is."""
    try:
        own = model.state_dict()
    except StepError:  # a model that must be loaded does not give its state
        named = dict((*nn.Module.named_parameters(model), *model.named_buffers()))
        own = {name: value for name, value in named.items() if name in weights}
        own |= {name: value for name, value in weights.items() if name not in own}
    own = {name: value for name, value in own.items() if name in weights or not is_of_base(name, base)}
    if own.keys() != weights.keys():
        missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
        raise CheckpointError(
            f"{path} is of another model: it lacks {_first(missing)} and has {_first(unknown)} that this one has not"
        )
    masters = with_masters(model)
    wide = {name for name, p in nn.Module.named_parameters(model, remove_duplicate=False) if id(p) in masters}
    for name, value in own.items():
        if not isinstance(value, Tensor) and not isinstance(weights[name], Tensor):
            continue
        if tuple(value.shape) != tuple(weights[name].shape):
            raise CheckpointError(
                f"{path} is of another model: {name} has the shape {tuple(weights[name].shape)} there, "
                f"{tuple(value.shape)} here"
            )
        if weights[name].dtype not in (value.dtype, *[torch.float32] * (name in wide)):
            raise CheckpointError(
                f"{path}: expected {name} in {value.dtype}, as in this model, found {weights[name].dtype}: a conversion would "
                f"change its bits. Convert the model first, with model.to({weights[name].dtype}), and compile it or convert it "
                "back after load"
            )
        if overlaps(value):
            raise CheckpointError(
                f"expected a tensor whose elements have places of their own to load {name} into, found one that was expanded: "
                "make it contiguous first"
            )


def _compare_gradients(path: Path, model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Raises CheckpointError for gradients that are not those of the model's parameters."""
    parameters, wide = dict(nn.Module.named_parameters(model)), with_masters(model)
    for name, gradient in saved.items():
        parameter = parameters.get(name)
        if parameter is None or not isinstance(gradient, Tensor) or gradient.shape != parameter.shape:
            raise CheckpointError(f"{path}: the gradient of {name} is not one of this model: save after zero_grad()")
        dtypes = {parameter.dtype, parameter.grad_dtype or gradient.dtype, *[torch.float32] * (id(parameter) in wide)}
        if gradient.dtype not in dtypes:
            raise CheckpointError(
                f"{path}: expected a gradient of {parameter.dtype} for {name}, found {gradient.dtype}: load it into a model "
                'compiled with precision="bf16-master32", or save after zero_grad()'
            )


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3) if names else "nothing"


def _compare_optimizer(path: Path, optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Raises CheckpointError if the groups are not the optimizer's."""
    if saved is None:
        raise CheckpointError(f"{path} holds no state of an optimizer; pass none, or save with one")
    try:
        rows = [(len(group["params"]), set(group), group.get("param_names")) for group in saved["param_groups"]]
        states = dict(saved["state"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: the optimizer's state cannot be used: {error!r}") from None
    own, other = [len(group["params"]) for group in optimizer.param_groups], [row[0] for row in rows]
    if own != other:
        raise CheckpointError(f"{path}: expected an optimizer with groups of {other} parameters, found {own}")
    parameters = dict(numbered(optimizer, saved))
    if len(parameters) != sum(own):
        raise CheckpointError(f"{path}: expected a number of its own for each parameter of the optimizer, found some twice")
    for group, (_, keys, names) in zip(optimizer.param_groups, rows, strict=True):
        if lacking := sorted(set(group) - keys - {"param_names"}):
            raise CheckpointError(
                f"{path}: expected the state of {type(optimizer).__name__}, found none of {', '.join(lacking)}"
            )
        if names is not None and group.get("param_names") not in (None, names):
            raise CheckpointError(f"{path}: the optimizer has its parameters in another order than {_first(list(names))}")
    for saved_group, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        for key in sorted(set(group) - {"params", "param_names"}):
            if not _alike(saved_group[key], group[key]) or not _possible(key, saved_group[key]):
                raise CheckpointError(f"{path}: expected {key} to be like {group[key]!r:.80}, found {saved_group[key]!r:.80}")
    for number, entry in states.items():
        shape = tuple(parameters[number].shape) if number in parameters else None
        for key, value in entry.items():
            if key == "step" and not (isinstance(value, (int, float, Tensor)) and _possible("lr", value)):
                raise CheckpointError(f"{path}: expected step of parameter {number} to be 0 or more, found {value!r:.80}")
            if key in _LIKE_PARAMETERS and value is not None and (not isinstance(value, Tensor) or tuple(value.shape) != shape):
                about = f"the shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"the value {value!r:.80}"
                raise CheckpointError(f"{path}: {key} of parameter {number} has {about}, expected the shape {shape}")


def _alike(saved: Any, own: Any) -> bool:
    """Tells whether options of an optimizer are of one kind: numbers, text, or as many of them. An option of None may be any,
    and one that is on or off may be None, which leaves it to torch."""
    if saved is None or own is None:
        return own is None or isinstance(own, bool)
    if isinstance(own, (list, tuple)):
        return isinstance(saved, (list, tuple)) and len(saved) == len(own) and all(map(_alike, saved, own))
    kinds = ((int, float, Tensor), str, dict)
    return any(isinstance(saved, kind) and isinstance(own, kind) for kind in kinds) or not isinstance(own, kinds)


def _possible(key: str, value: Any) -> bool:
    """Tells whether an option's numbers are finite and, for those that torch wants so, not below 0."""
    if isinstance(value, (list, tuple)):
        return all(_possible(key, each) for each in value)
    if isinstance(value, Tensor):
        return value.is_meta or all(_possible(key, each) for each in value.detach().flatten()[:_MOST_OPTION_NUMBERS].tolist())
    if not isinstance(value, (int, float)):
        return True
    return math.isfinite(value) and (value >= 0 or key not in _NOT_NEGATIVE)


def _rehearse(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Loads the state into an optimizer of the same class whose tensors have no memory. Raises what torch's class raises. One
    of another library is not known well enough to be copied."""
    if type(optimizer).__module__.split(".")[:2] != ["torch", "optim"]:
        return
    groups = [{**group, "params": _memoryless(list(group["params"]))} for group in optimizer.param_groups]
    trial = type(optimizer).__new__(type(optimizer))
    trial.__setstate__({"defaults": optimizer.defaults, "state": defaultdict(dict), "param_groups": groups})
    trial.load_state_dict((own := without_masters(saved)) | {"state": _memoryless(own["state"])})


def _memoryless(value: Any) -> Any:
    """Returns state with tensors without memory, but for counters and the like."""
    if isinstance(value, Tensor):
        return value if value.dim() == 0 and not isinstance(value, nn.Parameter) else value.detach().to("meta")
    if isinstance(value, dict):
        return {key: _memoryless(item) for key, item in value.items()}
    return type(value)(map(_memoryless, value)) if isinstance(value, (list, tuple)) else value


def _compare_masters(path: Path, model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Raises CheckpointError for fp32 masters that this model would lose."""
    if not with_masters(model) and any(MASTER in entry for entry in saved["state"].values()):
        raise CheckpointError(
            f"{path} holds fp32 masters of bf16 weights, and this model has none: compile it with "
            'precision="bf16-master32" and its optimizer before load'
        )


def _compare_order(path: Path, own: list[list[str | None]], saved: Any) -> None:
    """Raises CheckpointError if an optimizer has its parameters in another order than was saved: state goes by their numbers.
    Checkpoints of earlier versions have no names."""
    if saved is None or own == saved:
        return
    pairs = ((number, pair) for number, names in enumerate(zip(own, saved, strict=True)) for pair in zip(*names, strict=True))
    group, (here, there) = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    raise CheckpointError(
        f"{path}: expected {there or 'a parameter of another model'} in group {group} of the optimizer, found "
        f"{here or 'a parameter of another model'}: make the optimizer with its parameters in the order of the one that was "
        "saved, or its state would go to others"
    )
