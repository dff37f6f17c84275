"""Plans as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_args

from mtcompile.passes.plan.decisions import Choice, Decision, Kind
from mtcompile.passes.plan.plan import FORMAT, Certificate, Plan, Updates


def plan_from_json(text: str) -> Plan:
    """The plan that ``to_json`` wrote. Raises ValueError, with the field, when it is not one."""
    try:
        data: Any = json.loads(text)
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ValueError(f"expected a plan of format {FORMAT!r}; write one with plan.to_json()")
        decisions = tuple(Decision(**checked(Decision, row)) for row in data.pop("decisions"))
        updates, certificate = data.pop("updates", None), data.pop("certificate", None)
        return Plan(
            decisions=decisions,
            updates=None if updates is None else Updates(**checked(Updates, updates)),
            certificate=None if certificate is None else Certificate(**checked(Certificate, certificate)),
            **checked(Plan, data),
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"expected a plan, found a field that is missing or of the wrong type: {error!r}") from None


_MOST = 2.0**63
_IS_TYPE: dict[str, Callable[[Any], bool]] = {  # by annotation; all other annotations are kinds of strings
    "int": lambda v: type(v) is int and abs(v) < _MOST,
    "float": lambda v: type(v) in (int, float) and abs(v) < _MOST,
    "float | None": lambda v: v is None or (type(v) in (int, float) and abs(v) < _MOST),
    "bool": lambda v: type(v) is bool,
    "tuple[str, ...]": lambda v: type(v) is tuple and all(type(x) is str for x in v),
    "Choice": lambda v: v in get_args(Choice),
    "Kind": lambda v: v in get_args(Kind),
    "Mapping[str, int | None]": lambda v: type(v) is dict and all(x is None or _IS_TYPE["int"](x) for x in v.values()),
    "Mapping[str, int]": lambda v: type(v) is dict and all(map(_IS_TYPE["int"], v.values())),
    "Mapping[str, str]": lambda v: type(v) is dict and all(type(x) is str for x in v.values()),
    "Mapping[str, float]": lambda v: type(v) is dict and all(map(_IS_TYPE["float"], v.values())),
}


def checked(kind: type[Any], row: Any) -> dict[str, Any]:
    """Returns the fields of one object that text gave, with lists as tuples. Raises TypeError where a value is not of its
    field's type."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    for f in fields(kind):
        if f.name in values and not _IS_TYPE.get(str(f.type), lambda v: type(v) is str)(values[f.name]):
            raise TypeError(f"{kind.__name__} {f.name}: expected {f.type}, found {row[f.name]!r:.80}")
    return values
