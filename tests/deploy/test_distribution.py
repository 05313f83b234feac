"""`driftguard` on the package index is somebody else's: whoever is told to install gets this distribution."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.deploy.committed import PROJECT, ROOT

NAME: Final = PROJECT["name"]
INSTALL: Final = re.compile(
    r"\b(?:pip3?|pipx|uv tool|poetry|uv|pdm) (?:install|add|download)\b(?P<arguments>[^`|&;\n]*)"
)
REQUIREMENT: Final = re.compile(r"""(?<![\w./*-])driftguard(?:[-_]\w+)*(?=\[|[=<>~!]=|['"\s]|$)""")


def committed() -> Iterator[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and path != Path(__file__) and b"\0" not in path.read_bytes()[:1024]:
            yield path


def installed(text: str) -> list[str]:
    """The distributions named driftguard something that the install lines of a text ask for."""
    lines = [match["arguments"] for match in INSTALL.finditer(text)]
    return [name for line in lines for name in REQUIREMENT.findall(line)]


@pytest.mark.parametrize(
    "line",
    [
        "pip install driftguard",
        "`pip install 'driftguard[embedded]'`",
        "/opt/driftguard/bin/pip install --upgrade driftguard",
        "uv pip install driftguard==0.1",
    ],
)
def test_a_line_that_installs_somebody_elses_is_seen(line: str) -> None:
    assert installed(line) == ["driftguard"]


def test_every_install_line_names_this_distribution() -> None:
    found = {path: installed(path.read_text(encoding="utf-8")) for path in committed()}
    assert {str(path): names for path, names in found.items() if set(names) - {NAME}} == {}
    assert sum(map(len, found.values())) > 10


def test_extras_that_are_named_are_there() -> None:
    """In install lines, and where the distribution asks for itself."""
    for path in committed():
        for extras in re.findall(rf"{NAME}\[([\w,-]+)\]", path.read_text(encoding="utf-8")):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"]), path
