"""A hook of MkDocs: files of the repository that pages link to, and that lie outside docs/, become part of the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
_OUTSIDE = "repository"  # the site's folder for them
_LINK = re.compile(r"(\]\()([^)\s#:]+)([)#])")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.M | re.S)


def on_files(files: Files, config: Any) -> Files:
    """Adds what is linked to, and what that links to. Of a folder, a list of its files."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    known = set(waiting)
    for path in waiting:  # which grows
        for _, target, _ in _LINK.findall(_CODE.sub("", _text(path))):
            linked = _resolved(path, target)
            if linked in known or linked.startswith("docs/"):
                continue
            if not (ROOT / linked).exists():
                raise PluginError(f"{path} links to {target}: expected a file {linked}, found none")
            known.add(linked)
            if (ROOT / linked).is_dir():
                files.append(File.generated(config, _uri(linked), content=_listing(linked)))
            else:
                files.append(File.generated(config, _uri(linked), abs_src_path=str(ROOT / linked)))
            if linked.endswith(".md"):
                waiting.append(linked)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links between files of the repository into links between files of the site."""
    uri = page.file.src_uri
    path = uri.removeprefix(f"{_OUTSIDE}/") if uri.startswith(f"{_OUTSIDE}/") else f"docs/{uri}"

    def link(match: re.Match[str]) -> str:
        target = _uri(_resolved(path, match[2]))
        return match[1] + posixpath.relpath(target, posixpath.dirname(uri) or ".") + match[3]

    return "".join(part if place % 2 else _LINK.sub(link, part) for place, part in enumerate(_CODE.split(markdown)))


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _resolved(path: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def _uri(path: str) -> str:
    """Returns the place in the site of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{_OUTSIDE}/{path}/index.md" if (ROOT / path).is_dir() else f"{_OUTSIDE}/{path}"


def _listing(folder: str) -> str:
    names = sorted(path.name for path in (ROOT / folder).iterdir() if not path.name.startswith(("_", ".")))
    return "\n".join([f"# {folder}", "", *(f"- `{name}`" for name in names), ""])
