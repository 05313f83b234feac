"""The files and functions that docs/architecture.md and CONTRIBUTING.md name are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.deploy.committed import ROOT

ARCHITECTURE: Final = ROOT / "docs" / "architecture.md"
PAGES: Final = [page for page in (ARCHITECTURE, ROOT / "CONTRIBUTING.md") if page.exists()]
PLACE: Final = re.compile(r"(?P<path>[\w*][\w.*-]*(?:/[\w.*-]+)*/?)(?:: (?P<name>\w+(?:\.\w+)?))?")
FILE: Final = re.compile(r"[\w.-]+\.(?:py|md|toml|json|yaml|yml)|Makefile|Dockerfile")
PLACEHOLDER: Final = re.compile(r"\b(?:ENGINE|NAME|NNNN)")  # of what a contributor is about to add
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def places(page: Path) -> Iterator[tuple[str, str | None]]:
    """(path, name defined there) of each span of inline code that is a path, or None for a path alone."""
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`([^`\n]+)`", prose):
        found = PLACE.fullmatch(span)
        if found and ("/" in found["path"] or FILE.fullmatch(found["path"])):
            yield PLACEHOLDER.sub("*", found["path"]), found["name"]


def defined(file: Path) -> set[str]:
    """Functions, classes, their methods as Class.method, and names that are assigned at the top."""
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            inside = (part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {node.name, *(f"{node.name}.{part.name}" for part in inside)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def tree() -> list[str]:
    """The paths that the block under "The tree" shows by its indentation."""
    block = ARCHITECTURE.read_text(encoding="utf-8").partition("## The tree")[2].split("```")[1]
    found: list[str] = []
    above: list[str] = []
    for line in block.strip().splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = line.split()
        files = [name for name in names if FILE.fullmatch(name)]
        above = above[:depth]
        if names[0].endswith("/"):
            above.append(names[0])
            found.append("".join(above))
        else:
            found += ["".join(above) + name for name in files]
    return found


@every_page
def test_files_exist(page: Path) -> None:
    assert [path for path, _ in places(page) if not list(ROOT.glob(path.rstrip("/")))] == []


@every_page
def test_functions_are_defined_where_the_page_says(page: Path) -> None:
    named = [(path, name) for path, name in places(page) if name is not None]
    assert named
    files = {path: ROOT / path for path, _ in named if (ROOT / path).is_file()}
    known = {path: defined(file) for path, file in files.items()}
    assert [f"{path}: {name}" for path, name in named if name not in known.get(path, set())] == []


def test_the_tree_shows_what_is_there() -> None:
    assert [path for path in tree() if not (ROOT / path).exists()] == []


def test_the_tree_shows_every_package() -> None:
    shown = {path.rstrip("/") for path in tree()}
    packages = {
        str(file.parent.relative_to(ROOT))
        for root in ("driftguard", "engine/driftguard_engine")
        for file in (ROOT / root).glob("*/__init__.py")
    }
    assert packages - shown == set()
