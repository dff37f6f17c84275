"""Models named on the command line: a built-in shape, a Hugging Face config.json or its folder, or file.py:factory."""

from __future__ import annotations

import importlib.util
import re
import reprlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtcompile.capture.refusals import first_line
from mtcompile.errors import did_you_mean
from mtcompile.models.decoders import fake, initial_values
from mtcompile.models.examples import example_inputs, takes_labels
from mtcompile.models.placing import Room, home_for, registered_parameters_on, with_values
from mtcompile.models.shapes import SHAPES, check_config, check_factory, check_shape
from mtcompile.reading import FEW_NBYTES, parsed_json, printable, read_text

_MOST_LAYERS = 10_000  # more would be built for minutes before anything is said
_MOST_COUNT = 1_000_000
_COUNTS = re.compile(r"labels$|experts$|heads$|groups$|_types$|^n_head$|^n_labels$")
_LAYERS = re.compile(r"(?<!max_window_)layers?$|num_.*layers|blocks$|depth$")
ModelAndData = tuple[nn.Module, Mapping[str, Any]]  # and the keyword arguments of its call


def model_named(text: str) -> str | Callable[[int, int], ModelAndData]:
    """Returns a built-in shape's name, or a factory of (batch, seq). Raises ValueError, here or when the factory is called."""
    if text not in SHAPES and (Path(text) / "config.json").is_file():
        text = str(Path(text) / "config.json")
    path, _, factory = text.rpartition(":")
    if text.endswith(".py"):
        check_factory(text)
    if not path.endswith(".py") and not text.endswith(".json"):
        return text

    def factory_of(batch: int, seq: int) -> ModelAndData:
        return _from_factory(path, factory, batch, seq) if path.endswith(".py") else _from_config(text, batch, seq)

    factory_of.__name__ = text
    return factory_of


def build_model(model: str | Callable[[int, int], Any], batch: int, seq: int) -> ModelAndData:
    """Builds a module with random weights, and random tokens for it. Raises ValueError."""
    if not isinstance(model, str):
        built = model(batch, seq)
        if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[1], Mapping)):
            raise ValueError(f"expected a factory to return (module, keyword arguments), found {type(built).__name__}")
        return built[0], built[1]
    tokens, targets = torch.randint(_shape(model).vocabulary, (2, batch, seq))
    return fake(_shape(model)), {"tokens": tokens, "targets": targets}


def language_model(text: str, room: Room, masters: bool = False) -> tuple[nn.Module, int]:
    """Builds a built-in shape, or a model of a Hugging Face configuration, as a module that takes (tokens, targets) and returns
    the mean loss, with random weights. They go to the disk of ``room`` if its memory does not hold them and their
    ``masters``, if there will be any. Returns it and the size of its vocabulary. Raises ValueError, BudgetError and
    DiskError."""
    built_in, folder = not text.endswith(".json"), None
    with torch.device("meta" if built_in or room.disk is not None else "cpu"):
        model: Any = fake(_shape(text)) if built_in else _causal_model(text)
    if room.disk is not None:
        sizes = [p.numel() * (4 if masters else p.element_size()) for p in model.parameters()]
        folder = home_for(f"make {text}", sizes, max(sizes), torch.float32 if masters else None, room)
    if built_in:
        return with_values(model, initial_values, folder), _shape(text).vocabulary
    if room.disk is not None:
        with registered_parameters_on(folder):
            model = _causal_model(text)
    return LanguageModel(model), int(model.config.vocab_size)


class LanguageModel(nn.Module):
    """A Transformers model that returns logits, with the cross-entropy of the tokens that follow."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def returning_loss(model: nn.Module) -> nn.Module:
    """Lets a Transformers model return its loss alone, so that the logits need not outlive it. Returns the model, whose class
    keeps its name."""
    plain: Any = type(model)

    def forward(self: nn.Module, **arguments: Any) -> Tensor:
        loss: Tensor = plain.forward(self, **arguments).loss
        return loss

    attributes = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "forward": forward}
    model.__class__ = type(plain.__name__, (plain,), attributes)
    return model


def _shape(name: str) -> Any:
    check_shape(name)
    return SHAPES[name]


def _from_factory(path: str, name: str, batch: int, seq: int) -> ModelAndData:
    factory = load_function(path, name)
    call = f"{path}:{name}({batch}, {seq})"
    try:
        built = factory(batch, seq)
    except Exception as error:
        raise ValueError(
            f"expected {call} to return (module, keyword arguments), found that it raised {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module) and isinstance(built[1], Mapping)):
        kinds = ", ".join(type(part).__name__ for part in built) if isinstance(built, tuple) else type(built).__name__
        raise ValueError(f"expected {call} to return (module, keyword arguments), found {kinds}")
    return built


def load_function(path: str, name: str) -> Callable[..., Any]:
    check_factory(f"{path}:{name}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None, "expected a file whose name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"expected {path} to be imported, found {type(error).__name__}: {error}") from error
    factory: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(factory):
        functions = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise ValueError(f"expected a function {name!r} in {path}, found none{did_you_mean(name, functions)}")
    return factory


def _from_config(path: str, batch: int, seq: int) -> ModelAndData:
    config, name = configuration(Path(path), use_cache=False)
    kind = _architecture(config)
    model = _built(path, config, name, kind)
    try:
        return model, example_inputs(model, batch, seq)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"expected {path} to say of which size the model's inputs are, found {first_line(error)}") from error


def _causal_model(path: str) -> Any:
    """Builds a causal language model of a Hugging Face configuration with random weights. Raises ValueError."""
    return _built(path, *configuration(Path(path), use_cache=False), None)


def _architecture(config: Any) -> Any:
    """Returns the class of Transformers that a configuration names in ``architectures``, if it is one of this configuration
    that computes a loss; else None."""
    import transformers

    named = getattr(config, "architectures", None)
    kind = getattr(transformers, named[0], None) if isinstance(named, list) and named and isinstance(named[0], str) else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) and takes_labels(kind)):
        return None
    return kind if isinstance(config, kind.config_class or ()) else None


def _built(path: str, config: Any, name: torch.dtype | None, kind: Any) -> Any:
    """Builds a model with random weights, of class ``kind`` or, by default, the causal language model of its type. Nothing is
    fetched or imported because the file asks for it. Raises ValueError."""
    from transformers import AutoModelForCausalLM

    before = torch.get_default_dtype()
    torch.set_default_dtype(name or torch.float32)
    try:
        return AutoModelForCausalLM.from_config(config) if kind is None else kind(config)  # type: ignore[no-untyped-call]
    except Exception as error:
        what = "a causal language model" if kind is None else kind.__name__
        text = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"expected {path} to configure {what}, found that it raised {text}") from error
    finally:
        torch.set_default_dtype(before)


def configuration(path: Path, **defaults: Any) -> tuple[Any, torch.dtype | None]:
    """Reads a Hugging Face configuration, and the dtype that it names. ``defaults``: fields that it need not have. Raises
    ValueError."""
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError:
        raise ValueError("a Hugging Face configuration needs the package transformers: pip install transformers") from None
    check_config(path)
    fields = _fields(path)
    given = {**defaults, **fields}
    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        found = "none" if kind is None else f"{printable(kind)!r:.80}{did_you_mean(str(kind), CONFIG_MAPPING)}"
        expected = "expected a Hugging Face config file with a model_type that Transformers knows, such as llama"
        raise ValueError(f"{expected}, found {path} with {found}")
    try:
        config = AutoConfig.for_model(**given)
    except Exception as error:  # a field of the wrong type has an exception of its own
        step = "correct the file, or take the one that the model was published with"
        raise ValueError(f"expected {path} to configure a model of type {kind}, found {_reason(error)}: {step}") from error
    of_text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    for field in ("vocab_size", "attention_chunk_size"):
        if (value := getattr(of_text, field, None)) is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{path}: {field}: expected a whole number above 0, found {value!r:.80}")
    name = fields.get("dtype") or fields.get("torch_dtype")
    if name not in (None, "float64", "float32", "bfloat16", "float16"):
        raise ValueError(f"{path}: expected a dtype of floating-point numbers, such as bfloat16, found {name!r}")
    return config, None if name is None else getattr(torch, name)


def _fields(path: Path) -> dict[str, Any]:
    """Reads the fields of a configuration. Raises ValueError."""
    expected = "expected a Hugging Face config file with a model_type, found"
    try:
        fields = _local(parsed_json(read_text(path, FEW_NBYTES), path.name))
    except RecursionError:
        raise ValueError(f"{expected} {path} with lists or objects that are nested too deep") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{expected} {path}: {first_line(error)}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{expected} {path} with {reprlib.repr(fields)} instead of an object of fields, {{...}}")
    return fields


def _reason(error: BaseException) -> str:
    """Returns why Transformers refuses fields. Its own error says only which check has failed, and has the cause in words. An
    error of Python says nothing of the file."""
    if (cause := error.__cause__) is not None:
        return first_line(cause).rstrip(".")
    said = first_line(error)
    return said if isinstance(error, ValueError) else f"a value that Transformers fails on ({type(error).__name__}: {said})"


def _local(fields: Any) -> Any:
    """Returns the fields of a configuration without those that name code of its own. Raises ValueError for those that name
    weights or kernels to be fetched, and for more layers than can be built."""
    if isinstance(fields, list):
        return [_local(value) for value in fields]
    if not isinstance(fields, dict):
        return fields
    for name, value in fields.items():
        words = value if isinstance(value, dict) else {"": value}
        if name.endswith("_implementation") and not all(w is None or str(w).isidentifier() for w in words.values()):
            raise ValueError(f"{name}: expected an implementation by name, such as 'sdpa', found {value!r}, which is fetched")
        if name in ("pretrained", "use_pretrained_backbone") and value:
            raise ValueError(f"{name}: expected false, found {value!r}: nothing is fetched")
        if _COUNTS.search(name) and isinstance(value, (int, float)) and value > _MOST_COUNT:
            raise ValueError(f"{name}: expected at most {_MOST_COUNT:,}, found {value:.3g}: an entry is made for each")
        if _LAYERS.search(name) and isinstance(value, (int, float)) and value > _MOST_LAYERS:
            raise ValueError(f"{name}: expected at most {_MOST_LAYERS:,}, found {value:.3g}: each is built before the plan")
    return {name: _local(value) for name, value in fields.items() if name not in ("auto_map", "trust_remote_code")}
