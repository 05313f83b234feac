"""Brings uPlot, which draws the charts of the status pages, into the package when it is built.

No file of it is in the repository: `uplot-python`, a requirement of the build alone, holds them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

STATIC: Final = Path("driftguard", "api", "pages", "static")
NOTICE: Final = "uPlot.LICENSE.txt"
_NAMES: Final = {"uPlot.iife.js": "uPlot.js", "uPlot.min.css": "uPlot.css"}  # there -> here


class BuildHook(BuildHookInterface[Any]):
    """Runs before the wheel, the sdist and an editable installation are made."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 (hatchling's)
        bring_uplot(Path(self.root))


def bring_uplot(root: Path) -> None:
    """Copies uPlot and its licence notice into the package under `root`. Raises FileNotFoundError where
    neither `uplot-python` is installed nor the files are there already, as in an sdist."""
    package = find_spec("uplot")  # not imported: that takes IPython
    if package is None or package.origin is None:
        missing = [name for name in (*_NAMES.values(), NOTICE) if not (root / STATIC / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{STATIC}: {', '.join(missing)} missing; install the build requirement uplot-python of "
                "pyproject.toml, or build with isolation"
            )
        return
    source = Path(package.origin).parent / "static"
    for name, ours in _NAMES.items():
        (root / STATIC / ours).write_bytes((source / name).read_bytes())
    (root / STATIC / NOTICE).write_text(_notice(root, source / "uPlot.iife.js"), encoding="utf-8")


def _notice(root: Path, script: Path) -> str:
    """The MIT licence, which is DriftGuard's too, with the holder that the script names in its head."""
    head = script.read_text(encoding="utf-8").splitlines(keepends=True)[:10]
    (holder,) = (line.lstrip("* ") for line in head if "Copyright (c)" in line)
    own = (root / "LICENSE").read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(holder if line.startswith("Copyright") else line for line in own)
