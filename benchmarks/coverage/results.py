"""The rows of a coverage run: kept one a line as they end, and summed up in docs/coverage.md."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.coverage.compare import BUDGETS, EQUAL, EXCLUDED, INTERNAL, NAMED, REFUSED, WRONG

ROOT = Path(__file__).parents[2]
STORE, PAGE = ROOT / "benchmarks/results/coverage.jsonl", ROOT / "docs/coverage.md"
_SOURCES = ("mtcompile", "passes", "runtime")
_WORST = (WRONG, INTERNAL, REFUSED, NAMED, EQUAL, EXCLUDED)

Row = dict[str, Any]  # entry, verdict, reason, where, about, budgets, seconds, and the versions below


@functools.cache
def versions() -> dict[str, str]:
    """Returns what a row is true of: the digest of the compiler's sources, and the versions of the libraries."""
    import torch

    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    libraries = {"torch": torch.__version__}
    try:
        import transformers
    except ImportError:
        return {"source": digest.hexdigest()[:12], **libraries}
    return {"source": digest.hexdigest()[:12], **libraries, "transformers": transformers.__version__}


def read(path: Path) -> dict[str, Row]:
    """Returns the newest row of each entry."""
    if not path.exists():
        return {}
    return {row["entry"]: row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def append(path: Path, row: Row) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def tidy(path: Path) -> None:
    """Leaves one line for each entry, in order of their names."""
    rows = read(path)
    path.write_text("".join(json.dumps(rows[name], ensure_ascii=False) + "\n" for name in sorted(rows)), encoding="utf-8")


def is_done(row: Row | None, budgets: Collection[str], again: Collection[str], any_source: bool) -> bool:
    """Whether an entry's row holds for the sources and libraries of now, at these budgets. ``again``: verdicts to be judged
    anew; ``any_source``: a row made with older sources counts too."""
    if row is None or row["verdict"] in again or (row["verdict"] == EQUAL and set(budgets) - set(row["budgets"])):
        return False
    return all(row.get(name) == value for name, value in versions().items() if not (any_source and name == "source"))


def family(entry: str) -> str:
    return entry.split("/")[0] if not entry.startswith("nn.") else "torch modules"


def subject(entry: str) -> str:
    """Returns what is counted: a module with all its samples, or an architecture with all its heads."""
    return entry.split("/")[0] if entry.startswith("nn.") else entry.split("/")[1]


def worst(rows: Iterable[Row]) -> str:
    """Returns the verdict on several rows: any that is not equal counts, and one that was excluded does not."""
    verdicts = {row["verdict"] for row in rows}
    return next(verdict for verdict in _WORST if verdict in verdicts)


def page(rows: Mapping[str, Row], missing: Collection[str]) -> str:
    """Returns the text of docs/coverage.md. ``missing``: libraries that are not installed."""
    modules = {name: row for name, row in rows.items() if name.startswith("nn.")}
    others = {name: row for name, row in rows.items() if not name.startswith("nn.")}
    now = next(iter(rows.values()), {})
    libraries = ", ".join(f"{name} {now[name]}" for name in ("torch", "transformers") if name in now)
    absent = f" Not installed, so not run: {', '.join(missing)}." if missing else ""
    lines = [
        "# Coverage",
        "",
        "Written by `make coverage`, from the rows in `benchmarks/results/coverage.jsonl`.",
        "",
        "Each entry is trained for two steps in plain PyTorch, and under mtcompile at three budgets: 1 GiB, the smallest that",
        "`BudgetError.minimum_bytes` names, and halfway (for all samples of a module but the first: the least memory of the",
        'policies "offload-all" and "checkpoint-all"). Equal means that losses, outputs, all gradients, buffers and the random',
        "generators have the same bits every time. An entry that plain PyTorch cannot train here, or whose results differ from",
        "run to run in plain PyTorch, is excluded. A module counts as equal if all its samples are that were not excluded; an",
        "architecture, if all its heads are. Layers that a random number skips (`layerdrop`) and masks that numpy draws",
        "(`mask_time_prob`) are switched off, because they are refused. Named: the last bits of gradients differ, and the",
        "`numerics` of the plan say so.",
        "",
        f"On a CPU, with {libraries}.{absent}{_partly(rows)}",
        "",
        "| | equal | named | refused | wrong | internal error | excluded | equal, of those counted |",
        "|---|---|---|---|---|---|---|---|",
        _counts("modules of torch", _by_subject(modules)),
        _counts("their samples, bare and between linear layers", {name: [row] for name, row in modules.items()}),
        _counts("architectures", _by_subject(others)),
    ]
    for name in sorted({family(entry) for entry in others}):
        lines.append(_counts(f"of these, {name}", {entry: [row] for entry, row in others.items() if family(entry) == name}))
    lines += ["", *_table("Not equal", [row for row in rows.values() if row["verdict"] in (WRONG, INTERNAL, REFUSED, NAMED)])]
    lines += _table("Excluded", [row for row in rows.values() if row["verdict"] == EXCLUDED])
    return "\n".join(lines).rstrip() + "\n"


def _partly(rows: Mapping[str, Row]) -> str:
    """Says how many entries have not run at all budgets yet, and how many only with other sources than now, if any."""
    few = sum(row["verdict"] == EQUAL and set(row["budgets"]) != set(BUDGETS) for row in rows.values())
    old = sum(row.get("source") != versions()["source"] for row in rows.values())
    texts = {f" {few} of the equal entries have run at the budget of 1 GiB only so far.": few}
    texts |= {f" {old} of {len(rows)} entries ran with earlier sources of mtcompile.": old}
    return "".join(text for text, count in texts.items() if count)


def _by_subject(rows: Mapping[str, Row]) -> dict[str, list[Row]]:
    groups = defaultdict(list)
    for entry, row in rows.items():
        groups[subject(entry)].append(row)
    return groups


def _counts(name: str, groups: Mapping[str, list[Row]]) -> str:
    verdicts = Counter(worst(rows) for rows in groups.values())
    counted = sum(verdicts.values()) - verdicts[EXCLUDED]
    share = f"{verdicts[EQUAL] / counted:.1%} of {counted}" if counted else "none run"
    cells = [verdicts[verdict] for verdict in (EQUAL, NAMED, REFUSED, WRONG, INTERNAL, EXCLUDED)]
    return f"| {name} | {' | '.join(map(str, cells))} | {share} |"


def _table(heading: str, rows: list[Row]) -> list[str]:
    """Returns one line per verdict and reason, with the entries that share it."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["verdict"], row["reason"]].append(row)
    if not groups:
        return [f"## {heading}", "", "None.", ""]
    lines = [f"## {heading}", "", "| entries | verdict | reason |", "|---|---|---|"]
    for (verdict, reason), members in sorted(groups.items(), key=lambda item: (_WORST.index(item[0][0]), -len(item[1]))):
        names = [row["entry"] + (f" ({row['about']})" if row.get("about") else "") for row in members]
        shown = ", ".join(sorted(names)[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        where = f" ({members[0]['where']})" if members[0].get("where") else ""
        lines.append(f"| {_cell(shown)} | {verdict} | {_cell(reason)}{where} |")
    return [*lines, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
