"""``mtcompile.from_pretrained``: weights of a local folder, read straight into the memory of a model's parameters."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mtcompile import knobs
from mtcompile.api import compile
from mtcompile.capture.refusals import first_line
from mtcompile.checkpoint.provenance import note_origin
from mtcompile.checkpoint.shards import StoredTensor, stored_tensors
from mtcompile.errors import CheckpointError
from mtcompile.models.four_bits import four_bits_of, keep_unpacked, names_in_four_bits
from mtcompile.models.loading import configuration
from mtcompile.models.placing import SMALL, Room, home_for, registered_parameters_on
from mtcompile.optim.own_files import in_own_file
from mtcompile.optim.precision import Precision, precision_named
from mtcompile.runtime.disk.errors import DiskError

_MOST_NAMES = 8  # that an error lists


def from_pretrained(
    folder: str | os.PathLike[str],
    model: Any = None,
    *,
    dtype: torch.dtype | str = "auto",
    base_bits: int | None = None,
    allow_new: Collection[str] = (),
    prepare: Callable[[Any], Any] | None = None,
    **options: Any,
) -> Any:
    """Loads weights from a local folder of safetensors files, tensor by tensor, and compiles the model.

    Loading needs room for the weights plus one tensor: files are read by place, never whole. Before anything is read, the
    sizes in the files' headers are compared with the host memory that there is. If the weights do not fit, they go to
    ``disk=``, where they take room beside the plan's own until the first step has moved them. No code of the folder is run,
    nothing is unpickled, and nothing is downloaded.

    folder   a folder that ``save_pretrained`` wrote or that was fetched from the Hugging Face hub; or any folder, file or index
             of safetensors, together with ``model``
    model    None: the class that the folder's configuration names, or AutoModelForCausalLM. A class of Transformers, such as
             ``AutoModelForSequenceClassification``: its model of that configuration. A module, usually built under
             ``torch.device("meta")``: its parameters and buffers get the weights of the same names
    dtype    of floating-point weights: a ``torch.dtype``, its name, or ``"auto"``, which is that of the configuration (else of
             the first tensor) or of the module. ``precision=`` overrides it
    base_bits  4: linear weights but the head's are quantized by bitsandbytes (nf4, nested) as they are read, and stay frozen:
             train adapters beside them. Folders that bitsandbytes has quantized to 4 bits are read as they are
    allow_new  names of tensors or modules, such as ``["score"]`` for a new head: those that the folder lacks, or has in another
             shape, are left as they were initialized, and those that the model has no place for are left out. A warning
             and each checkpoint say which are new
    prepare  a function that takes the plain model with its weights and returns the one to compile, for example
             ``lambda model: get_peft_model(model, LoraConfig(...))``
    options  the options of ``compile``: ``memory``, ``host``, ``precision``, ...

    A model of Transformers is what its own ``from_pretrained`` returns: in evaluation mode, with names and layouts of older
    checkpoints converted, and tied weights tied. Weights that are missing, have other shapes, or have no place in the model
    raise CheckpointError, unless ``allow_new`` names them; for a module, before anything is read. Raises BudgetError,
    with ``.minimum_bytes``, if the weights fit neither into host memory nor on the disk, and DiskError if that takes no files.
    """
    compiling = compile(**options)
    precision = precision_named(options.get("precision", "model"))
    if isinstance(allow_new, str):
        raise TypeError(f"expected allow_new to be a list of names, found text: pass allow_new=[{allow_new!r}]")
    tensors = stored_tensors(folder)
    room = Room.of(options.get("host"), options.get("disk"))
    if base_bits is not None and (base_bits != 4 or isinstance(model, nn.Module) or precision.split):
        raise ValueError(
            f"expected base_bits=4 with a model of Transformers and without fp32 masters, found {base_bits}: leave out "
            "base_bits=, or the module and precision="
        )
    if isinstance(model, nn.Module):
        loaded, new = _into_module(Path(folder), tensors, model, _weights(precision) or _dtype(dtype), room, allow_new)
    else:
        loaded, new = _of_transformers(
            Path(folder), tensors, model, _weights(precision) or _dtype(dtype), room, allow_new, base_bits
        )
    if new:
        warnings.warn(f"some weights are not from {folder}, and as they were initialized: {', '.join(new)}", stacklevel=2)
    note_origin(loaded, Path(folder), new)
    return compiling(loaded if prepare is None else prepare(loaded))


def plain_model(folder: Path) -> Any:
    """Returns the model of Transformers that a folder holds, in the dtype of its configuration and not compiled. Raises what
    ``from_pretrained`` raises."""
    loaded, new = _of_transformers(folder, stored_tensors(folder), None, None, Room(None, None), ())
    note_origin(loaded, folder, new)
    return loaded


def _weights(precision: Precision) -> torch.dtype | None:
    """Returns the dtype to read weights as: masters are split from fp32."""
    return torch.float32 if precision.split else precision.weights


def _dtype(given: torch.dtype | str) -> torch.dtype | None:
    named = getattr(torch, given, None) if isinstance(given, str) else given
    if given != "auto" and not (isinstance(named, torch.dtype) and named.is_floating_point):
        raise ValueError(f'expected dtype to be "auto" or of floating-point numbers, such as torch.bfloat16, found {given!r}')
    return None if given == "auto" else named


# ------------------------------------------------------------------------------------------------------------ Transformers


def _of_transformers(
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    model: Any,
    dtype: torch.dtype | None,
    room: Room,
    allow_new: Collection[str],
    base_bits: int | None = None,
) -> tuple[Any, list[str]]:
    """Returns the model that Transformers makes of the folder's configuration, and of tensors read when it asks for them; and
    the names of those that it has initialized."""
    if not folder.is_dir() or not (folder / "config.json").is_file():
        adapter = " It holds a PEFT adapter: load its base model first." * (folder / "adapter_config.json").is_file()
        raise ValueError(
            f"expected a folder with a config.json, found none in {folder}.{adapter} For other weights pass a module too: "
            "mtcompile.from_pretrained(folder, module)"
        )
    config, named = configuration(folder / "config.json")
    four_bits = four_bits_of(folder, config, base_bits)
    if dtype is None:
        dtype = named or next((each.dtype for each in tensors.values() if each.dtype.is_floating_point), torch.float32)
    model_class = _model_class(model, config)
    if not four_bits:
        _refuse_other_numbers(folder, tensors, model_class, config)
    packed = names_in_four_bits(model_class, config) if four_bits else set()
    sizes = [each.numel // 2 + each.numel // 32 if n in packed else each.nbytes_as(dtype) for n, each in tensors.items()]
    widest = max((each.nbytes_as(dtype) for each in tensors.values()), default=0)  # layouts of older files are converted
    home = home_for(f"load {folder}", sizes, widest, dtype, Room(room.host, None) if four_bits else room)
    try:
        with knobs.transformers_load_in_order(), registered_parameters_on(home):
            loaded, found = model_class.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **four_bits,
            )
    except DiskError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{folder} could not be loaded as {model_class.__name__}: {first_line(error)}. Check that its files belong "
            "together, or pass the class"
        ) from error
    if four_bits:
        keep_unpacked(loaded)
    own = {name: tuple(tensor.shape) for name, tensor in loaded.state_dict().items()}
    shapes = {name: (tuple(there), own.get(name, tuple(here))) for name, there, here in found["mismatched_keys"]}
    _refuse_others(folder, model_class.__name__, found["missing_keys"], found["unexpected_keys"], shapes, allow_new)
    loaded.config.name_or_path = str(folder)
    if loaded.can_generate() and (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        loaded.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return loaded, sorted(found["missing_keys"] | shapes.keys())


def _refuse_other_numbers(folder: Path, tensors: Mapping[str, StoredTensor], model_class: Any, config: Any) -> None:
    """Raises CheckpointError if the folder has weights in whole numbers, in 8 bits or complex that are none in the model.
    Transformers takes their values as they stand, also where it stacks them with others. What no name of the model fits, such
    as masks of older models, is left to it; only what is called a weight is refused then too."""
    odd = {name: each.dtype for name, each in tensors.items() if _kind(each.dtype) != "floating"}
    if not odd:
        return
    with torch.device("meta"):
        own: dict[str, torch.dtype] = {name: tensor.dtype for name, tensor in model_class(config).state_dict().items()}

    def is_wrong(name: str, dtype: torch.dtype) -> bool:
        # A part of a model may be saved without the names around it, or with more.
        here = [kind for mine, kind in own.items() if f".{mine}".endswith(f".{name}") or name.endswith(f".{mine}")]
        return any(_kind(kind) != _kind(dtype) for kind in here) if here else name.endswith("weight")

    wrong = [name for name, dtype in odd.items() if is_wrong(name, dtype)]
    if wrong:
        raise CheckpointError(
            f"{folder}: expected weights that are not quantized, found {odd[wrong[0]]} for {_first(wrong)}: take a folder with "
            "weights in bfloat16, float16 or float32"
        )


def _kind(dtype: torch.dtype) -> str:
    """Returns what kind of numbers a dtype has; those with 8 bits or fewer stand for others, by scales."""
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating" if dtype.itemsize > 1 else "quantized"
    return "whole"


def _model_class(model: Any, config: Any) -> Any:
    """Returns the class to load: the one given, else the one that wrote the folder, else a causal language model."""
    import transformers

    if model is not None and not (isinstance(model, type) and hasattr(model, "from_pretrained")):
        raise TypeError(f"expected a module or a class of transformers, such as AutoModelForCausalLM, found {model!r}")
    if model is not None and issubclass(model, transformers.PreTrainedModel):
        return model
    for name in getattr(config, "architectures", None) or () if model is None else ():
        named = getattr(transformers, str(name), None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel) and named.config_class is type(config):
            return named
    auto: Any = model or transformers.AutoModelForCausalLM
    try:
        with torch.device("meta"):  # an Auto class says which class it would take by making one of it
            return type(auto.from_config(config))
    except Exception as error:
        raise ValueError(
            f"expected a configuration of {auto.__name__}, found {config.model_type}: {first_line(error)}"
        ) from None


# ----------------------------------------------------------------------------------------------------------------- modules


def _into_module(
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    module: nn.Module,
    dtype: torch.dtype | None,
    room: Room,
    allow_new: Collection[str],
) -> tuple[nn.Module, list[str]]:
    """Gives a module's parameters and buffers the values of their names. ``dtype``: of floating-point parameters; None: their
    own. Everything is compared before anything is read, and a module on "meta" gets its memory then. Returns it, and the names
    of those that are left as they were."""
    own: dict[str, Tensor] = module.state_dict(keep_vars=True)
    values = _unsaved_buffers(module)
    without_values = {name: b for name, b in module.named_buffers() if b.is_meta and name not in values}
    untouched = _compare(folder, tensors, own, without_values, allow_new)
    tensors = {name: tensor for name, tensor in tensors.items() if name in own and name not in untouched}
    owners: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for table, name, tensor in _places(module):
        owners.setdefault(id(tensor), []).append((table, name))
    wanted = {name: _wanted_dtype(tensor, dtype) for name, tensor in own.items()}
    chosen = {id(own[name]): name for name in own if name in tensors}  # one name of each tensor, tied or not
    for name, stored in tensors.items():
        if (other := chosen[id(own[name])]) != name and not torch.equal(stored.read(), tensors[other].read()):
            raise CheckpointError(f"{folder}: expected one tensor for {other} and {name}, which the module ties, found two")
    sizes = [own[name].numel() * wanted[name].itemsize for name in chosen.values() if own[name].is_meta]
    widest = max((tensors[name].nbytes_as(wanted[name]) for name in chosen.values()), default=0)
    kinds = {each for each in wanted.values() if each.is_floating_point}
    home = home_for(f"load {folder}", sizes, widest, kinds.pop() if len(kinds) == 1 else None, room)
    new: dict[int, Tensor] = {}
    for identity, name in chosen.items():
        tensor, read = own[name], tensors[name].read(wanted[name]).to(wanted[name])
        if not tensor.is_meta and wanted[name] == tensor.dtype:
            with torch.no_grad():
                tensor.copy_(read)
        else:
            if home is not None and read.nbytes >= SMALL:
                read = in_own_file(read, home)
            parameter = isinstance(tensor, nn.Parameter)
            new[identity] = nn.Parameter(read, requires_grad=tensor.requires_grad) if parameter else read
    new |= {id(module.get_buffer(name)): buffer for name, buffer in values.items()}
    for identity, tensor in new.items():
        for table, key in owners[identity]:
            table[key] = tensor
    return module, untouched


def _wanted_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    cast = dtype is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
    return dtype if cast and dtype is not None else tensor.dtype


def _places(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yields every place of a parameter or buffer: the table that holds it, its name there, and the tensor."""
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            yield from ((table, name, tensor) for name, tensor in table.items() if tensor is not None)


def _unsaved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the values of buffers on "meta" that no file holds (persistent=False), for a model of Transformers: those of
    another one of its class, built without memory for parameters."""
    missing = [name for name, buffer in module.named_buffers() if buffer.is_meta and name not in module.state_dict()]
    if not missing or type(module).__module__.split(".")[0] != "transformers":
        return {}
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        twin = type(module)(module.config)
    return {name: buffer for name, buffer in twin.named_buffers() if name in missing}


def _compare(
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    own: Mapping[str, Tensor],
    without_values: Mapping[str, Tensor],
    allow_new: Collection[str],
) -> list[str]:
    """Returns the names of tensors that are left as they are. Raises CheckpointError if other names, shapes or kinds of numbers
    are not the module's, or if a tensor would have no values."""
    given = {id(own[name]) for name in own if name in tensors}
    missing = [name for name, tensor in own.items() if id(tensor) not in given]
    unknown = [name for name in tensors if name not in own]
    pairs = {name: (tensor.shape, tuple(own[name].shape)) for name, tensor in tensors.items() if name in own}
    shapes = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    _refuse_others(folder, "the module", missing, unknown, shapes, allow_new)
    new = [name for name in own if name in missing or name in shapes]
    for name, tensor in tensors.items():
        if name in unknown or name in new:
            continue
        here, there = own[name].dtype, tensor.dtype
        if _kind(here) != _kind(there):
            raise CheckpointError(f"{folder}: expected {name} of {here}, found {there}; change the module")
    if empty := [name for name in new if own[name].is_meta]:
        raise CheckpointError(
            f"{_first(empty)} would be new, and has no values on the device meta; expected it with values: build it under "
            'torch.device("cpu")'
        )
    for name, buffer in without_values.items():
        if id(buffer) not in given:
            raise CheckpointError(
                f"{name} is a buffer on the device meta that no file holds (persistent=False); expected it with values: build "
                f'it under torch.device("cpu")'
            )
    return new


def _refuse_others(
    folder: Path,
    what: str,
    missing: Iterable[str],
    unknown: Iterable[str],
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    allow_new: Collection[str],
) -> None:
    """Raises CheckpointError unless ``allow_new`` names every tensor that the folder lacks, that ``what`` has no place for, or
    that has another shape there than here (``shapes``)."""

    def refused(names: Iterable[str]) -> list[str]:
        return sorted(name for name in names if not any(name == new or name.startswith(f"{new}.") for new in allow_new))

    lacking, left, reshaped = map(refused, (missing, unknown, shapes))
    if not (lacking or left or reshaped):
        return
    others = [f"{name} of shape {shapes[name][0]} instead of {shapes[name][1]}" for name in reshaped]
    new = sorted({*allow_new, *(name.rpartition(".")[0] or name for name in (*lacking, *left, *reshaped)[:_MOST_NAMES])})
    raise CheckpointError(
        f"expected the weights of {what} in {folder}; missing there: {_first(lacking)}; of other shapes: {_first(others)}; not "
        f"in {what}: {_first(left)}. Take files and a configuration that belong together. If a part is to be new, such "
        f"as a head, name it: allow_new={new} (--allow-new NAME)"
    )


def _first(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" * (len(names) > _MOST_NAMES)
    return ", ".join(names[:_MOST_NAMES]) + more if names else "nothing"
