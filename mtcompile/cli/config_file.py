"""``train --config``: its options from a YAML file, each checked as on the command line. Flags override them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from mtcompile.cli.options import RecipeOptions
from mtcompile.reading import read_text

_MOST_NBYTES = 1 << 16  # the parser is slow


def set_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Takes a file's values as defaults of the options of ``train``. Raises ValueError with the file, the line and the key."""
    if path is None or context.resilient_parsing:
        return path
    options = {str(p.name): p for p in context.command.params if p.name not in ("config", "help")}
    defaults: dict[str, Any] = {}
    for place, key, values in _entries(path):
        name = key.replace("-", "_")
        if name not in options:
            close = difflib.get_close_matches(name, options, 1)
            step = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(options))}"
            raise ValueError(f"{place}: expected an option of mtcompile {context.info_name}, found {key!r}: {step}")
        if name in defaults:
            raise ValueError(f"{place}: expected {key} once, found it again: delete one of the two")
        defaults[name] = _checked(context, options[name], values, f"{place}: {key}")
    context.default_map = {**(context.default_map or {}), **{k: v for k, v in defaults.items() if v is not None}}
    return path


def _checked(context: typer.Context, option: Any, values: list[str] | str | None, place: str) -> list[str] | str | None:
    """Returns the texts of an option's value, as the command line takes them. Raises ValueError for one of another type."""
    words, several = _expected(str(option.name))
    if isinstance(values, list) and not several:
        raise ValueError(f"{place}: expected {words}, found a list")
    for text in [values] if isinstance(values, str) else values or []:
        try:
            option.process_value(context, [text] if several else text)
        except typer.BadParameter:
            raise ValueError(f"{place}: expected {words}, found {text!r:.80}") from None
    return [values] if several and isinstance(values, str) else values


def _expected(name: str) -> tuple[str, bool]:
    """Returns what an option takes in words, and whether it takes several."""
    hint = get_type_hints(RecipeOptions, include_extras=True).get(name, str)
    annotation, about = (get_args(hint)[0], get_args(hint)[1]) if get_origin(hint) is Annotated else (hint, None)
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(get_args(annotation))}", False
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kinds[0], "a path")
    least = getattr(about, "min", None)
    return words if least is None else f"{words} of {least} or more", get_origin(kinds[0]) is list


def _entries(path: Path) -> Iterator[tuple[str, str, list[str] | str | None]]:
    """Yields the place, the key and the value of each entry, as text. Nothing that a file asks for is constructed."""
    try:
        import yaml
    except ImportError:
        raise ValueError(f'{path}: a YAML file needs the package PyYAML: pip install "mtcompile[hf]"') from None
    try:
        root = yaml.compose(read_text(path, _MOST_NBYTES), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or "it is not text"
        raise ValueError(
            f"{path}{line}: expected YAML, found something else ({reason}): write one 'key: value' a line"
        ) from None
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path}, line 1: expected one 'key: value' a line, found something else")
    for key, value in root.value:
        place = f"{path}, line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise ValueError(f"{place}: expected the name of an option, found a list or a mapping")
        parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if not all(isinstance(part, yaml.ScalarNode) for part in parts):
            raise ValueError(f"{place}: {key.value}: expected a value or a list of values, found a mapping")
        texts = [str(part.value) for part in parts]
        if isinstance(value, yaml.SequenceNode):
            yield place, key.value, texts
        else:
            yield place, key.value, None if value.tag.endswith(":null") else texts[0]
