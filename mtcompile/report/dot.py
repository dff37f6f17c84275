"""A rewritten step graph as a drawing: DOT text, and SVG where graphviz is installed.

A cluster per block and phase; what the rewrites inserted in shapes and colours of its own (those of Okabe and Ito, which
people who see colours differently tell apart); an edge says how many bytes go from one call to another.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import fx

from mtcompile.passes.lower import work_of
from mtcompile.passes.step_graph import calls, inputs_of, is_region, outputs_of, results
from mtcompile.runtime.schedule import gib

# kind of work, home or result -> (shape, fill colour, what it is)
LOOKS: Mapping[str, tuple[str, str, str]] = {
    "compute": ("box", "#FFFFFF", "region"),
    "recompute": ("hexagon", "#E69F00", "region that computes something again"),
    "prefetch": ("invhouse", "#56B4E9", "to the device"),
    "offload": ("house", "#009E73", "to the host"),
    "update": ("octagon", "#F0E442", "optimizer's update"),
    "collective": ("doubleoctagon", "#D55E00", "combined over all ranks"),
    "convert": ("parallelogram", "#CC79A7", "cast on the host"),
    "home": ("cylinder", "#DDDDDD", "exists before the step"),
    "result": ("note", "#DDDDDD", "leaves the step"),
}


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A node: its place (phase and block; None for homes and results) and its text."""

    kind: str
    lines: tuple[str, ...]
    place: tuple[str, int] | None = None


@dataclass(slots=True)
class _Drawing:
    nodes: dict[str, _Drawn] = field(default_factory=dict)
    edges: dict[tuple[str, str], int] = field(default_factory=dict)
    labels: dict[tuple[str, int], str] = field(default_factory=dict)

    def flow(self, one: str, other: str, nbytes: int) -> None:
        self.edges[one, other] = self.edges.get((one, other), 0) + nbytes


def dot(step: fx.GraphModule, fold: bool = False) -> str:
    """Returns the graph in the DOT language. ``fold``: draws only the first of neighbouring blocks in which the same happens to
    the same bytes, and says how many there are."""
    drawing = _drawing(step)
    if fold:
        drawing = _folded(drawing, step)
    lines = ["digraph step {", "  newrank=true; fontname=Helvetica;"]
    lines += ["  node [style=filled, fontname=Helvetica, fontsize=10]; edge [fontname=Helvetica, fontsize=9];"]
    places: dict[tuple[str, int] | None, list[str]] = {}
    for name, node in drawing.nodes.items():
        places.setdefault(node.place, []).append(name)
    for place, names in places.items():
        rows = [_node(name, drawing.nodes[name]) for name in names]
        if place is None:
            lines += [f"  {row}" for row in rows]
            continue
        colour = "#0072B2" if place[0] == "forward" else "#D55E00"
        lines.append(f"  subgraph cluster_{place[0]}_{place[1]} {{")
        lines.append(f"    label={_quoted(drawing.labels[place])}; color={_quoted(colour)}; penwidth=2; fontsize=11;")
        lines += [f"    {row}" for row in rows] + ["  }"]
    for (one, other), nbytes in drawing.edges.items():
        lines.append(f"  {_quoted(one)} -> {_quoted(other)} [label={_quoted(gib(nbytes))}];")
    return "\n".join([*lines, *_legend({node.kind for node in drawing.nodes.values()}), "}"]) + "\n"


def render(text: str, path: str | Path) -> None:
    """Writes DOT text to a .dot or .svg file. Raises ValueError for any other file, and for SVG without graphviz."""
    path = Path(path)
    if path.suffix == ".dot":
        path.write_text(text)
        return
    if path.suffix != ".svg":
        raise ValueError(f"expected a file that ends in .dot or .svg, found {path}")
    program = shutil.which("dot")
    if program is None:
        raise ValueError("an .svg file needs graphviz's dot on the path, found none; write a .dot file, or install graphviz")
    process = subprocess.run([program, "-Tsvg", "-o", str(path)], input=text, text=True, capture_output=True)
    if process.returncode:
        raise ValueError(f"expected dot to draw the graph, found: {process.stderr.strip()[:300]}")


# --------------------------------------------------------------------------------------------------------------- drawing


def _drawing(step: fx.GraphModule) -> _Drawing:
    drawing = _Drawing()
    homes, producer = _homes(step, drawing), {}
    for call in calls(step):
        drawing.nodes[call.name] = _drawn(call)
        place = call.meta["phase"], call.meta["block"]
        drawing.labels[place] = f"{step.meta['blocks'][place[1]]}, {place[0]}"
        producer.update(dict.fromkeys(results(call), call.name))
        operands: Any = call.args
        for value in operands:
            drawing.flow(producer.get(value) or homes[value], call.name, value.meta["nbytes"])
    for spec, value in outputs_of(step):
        name = f"{spec.kind}s"
        drawing.nodes.setdefault(name, _Drawn("result", (_RESULTS[spec.kind],)))
        drawing.flow(producer.get(value) or homes[value], name, value.meta["nbytes"])
    return drawing


_RESULTS = {"output": "outputs", "grad": "gradients", "mutation": "new buffers", "update": "updated parameters"}


def _homes(step: fx.GraphModule, drawing: _Drawing) -> dict[fx.Node, str]:
    """Draws one node per block's parameters in a tier, and one per role of all else that exists before the step."""
    groups: dict[tuple[str, str, str], list[fx.Node]] = {}
    for spec, node in inputs_of(step):
        block = step.meta["homes"].get(spec.name, "") if spec.role == "param" else ""
        if node.users:
            groups.setdefault((spec.role, block, node.meta["tier"]), []).append(node)
    names: dict[fx.Node, str] = {}
    for (role, block, tier), nodes in groups.items():
        name = f"home {role} {block} {tier}"
        what = f"{block} parameters" if block else f"{role}s"
        total = sum(node.meta["nbytes"] for node in nodes)
        drawing.nodes[name] = _Drawn("home", (what, f"{gib(total)} on the {tier}"))
        names.update(dict.fromkeys(nodes, name))
    return names


def _drawn(call: fx.Node) -> _Drawn:
    kind = work_of(call)
    nbytes = sum(item.meta["nbytes"] for item in results(call))
    lines = [call.name, str(call.target) if is_region(call) else LOOKS[kind][2], gib(nbytes)]
    return _Drawn(kind, tuple(lines), (call.meta["phase"], call.meta["block"]))


def _node(name: str, node: _Drawn) -> str:
    shape, colour, _ = LOOKS[node.kind]
    return f"{_quoted(name)} [shape={shape}, fillcolor={_quoted(colour)}, label={_quoted(chr(10).join(node.lines))}];"


def _legend(kinds: Iterable[str]) -> list[str]:
    rows = [f"    {_node(f'legend {kind}', _Drawn(kind, (LOOKS[kind][2],)))}" for kind in LOOKS if kind in kinds]
    return ["  subgraph cluster_legend {", '    label="legend"; color="#999999";', *rows, "  }"]


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


# --------------------------------------------------------------------------------------------------------------- folding


def _folded(drawing: _Drawing, step: fx.GraphModule) -> _Drawing:
    """Keeps only the first of each run of alike blocks. Edges of the others go to and from it, each counted once."""
    alike: dict[int, list[tuple[object, ...]]] = {}
    members: dict[int, list[str]] = {}
    for call in calls(step):
        operands: Any = call.args
        sizes = tuple(value.meta["nbytes"] for value in (*operands, *results(call)))
        target = str(call.target) if is_region(call) else ""
        alike.setdefault(call.meta["block"], []).append((call.meta["phase"], work_of(call), target, sizes))
        members.setdefault(call.meta["block"], []).append(call.name)
    for name, node in drawing.nodes.items():  # homes of alike blocks come with them
        for block in members:
            if node.kind == "home" and name.startswith(f"home param {step.meta['blocks'][block]} "):
                members[block].append(name)
                alike[block].append((node.kind, node.lines[1:]))
    first = {block: block for block in members}
    for block in sorted(members):
        if block - 1 in members and alike[block] == alike[block - 1]:
            first[block] = first[block - 1]
    count = {block: sum(other == block for other in first.values()) for block in members}
    stands: dict[str, str] = {}
    for block, names in members.items():
        stands |= dict(zip(names, members[first[block]], strict=True))
    folded = _Drawing({name: node for name, node in drawing.nodes.items() if stands.get(name, name) == name})
    for block, names in members.items():
        for name in names if first[block] == block and count[block] > 1 else ():
            if (node := folded.nodes[name]).kind == "home":
                folded.nodes[name] = replace(node, lines=(f"{node.lines[0]} ... x {count[block]}", *node.lines[1:]))
    for (phase, block), label in drawing.labels.items():
        if first[block] == block:
            folded.labels[phase, block] = label + (f" ... x {count[block]}" if count[block] > 1 else "")
    for (one, other), nbytes in drawing.edges.items():
        ends = stands.get(one, one), stands.get(other, other)
        if ends[0] != ends[1]:
            folded.edges[ends] = max(folded.edges.get(ends, 0), nbytes)
    return folded
