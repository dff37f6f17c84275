"""The stages of one step as text: the captured graph, the step graph before and after the rewrites, and the schedule."""

from __future__ import annotations

from typing import Any

from torch import fx

from mtcompile.forecast.result import Forecast
from mtcompile.forecast.solve import plan
from mtcompile.passes.step_graph import describe, listing

STAGES = ("joint graph", "step graph", "rewritten step graph", "schedule")


def print_readable(model: Any, data: Any = None, **options: Any) -> str:
    """Returns every stage of a model's step under its heading. ``model``, ``data`` and ``options``: as ``mtcompile.plan``
    takes them, or a Forecast alone. Raises ValueError where nothing fits (``force=True`` shows the leanest plan) and what
    ``plan`` raises."""
    forecast = model if isinstance(model, Forecast) else plan(model, data, **options)
    return "\n\n".join(f"# {stage}\n{text}" for stage, text in stages(forecast).items())


def stages(forecast: Forecast) -> dict[str, str]:
    """Returns stage -> its text."""
    joint, problem, planned = forecast.joint, forecast.problem, forecast.planned
    if planned is None or joint is None or problem is None:
        refusal = forecast.refusal or f"one {forecast.short_bytes} bytes short"
        raise ValueError(f"expected a step that fits, found {refusal}; give more memory, or force=True")
    texts = (joint_listing(joint), listing(problem.step), listing(planned.step), str(planned.schedule))
    return dict(zip(STAGES, texts, strict=True))


def joint_listing(joint: fx.GraphModule) -> str:
    """Returns a line per operation: phase, result, operation, operands, and the module that it belongs to."""
    lines = []
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            lines.append(f"{node.name}: {describe(node.meta['val'])}")
        elif node.op == "output":
            lines += [f"return {s.kind} {s.name}: {v}" for s, v in zip(joint.meta["outputs"], node.args[0], strict=True)]
        else:
            target = getattr(node.target, "__name__", None) if not hasattr(node.target, "_schema") else str(node.target)
            operands = ", ".join([*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())])
            described = describe(node.meta.get("val"))
            path = node.meta.get("module_path", "")
            name = f"{node.name}: {described}" if described else node.name
            lines.append(
                f"{str(node.meta.get('phase', ''))[:3]} {name} = {target}({operands})" + (f"  ; {path}" if path else "")
            )
    return "\n".join(lines)
