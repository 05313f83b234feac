"""Hooks of pytest that run each test once over several processes, one after another. No torch."""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

import pytest

BEGUN_TESTS = "DRIFTGUARD_BEGUN_TESTS"  # names a file of those that have begun, a line each
ALL_RAN = "all ran"  # its last line
SECONDS_FOR_A_TEST = 120.0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those that an earlier process has begun are not run again."""
    if (begun := _begun()) is not None:
        over = set(begun.read_text(encoding="utf-8").splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in over])
        items[:] = [item for item in items if item.nodeid not in over]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if (begun := _begun()) is not None:
        _tell(begun, item.nodeid)
        # A kernel that never ends cannot be interrupted by this process: it has to end.
        faulthandler.dump_traceback_later(SECONDS_FOR_A_TEST, exit=True)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Stops the run where the device is lost: every later test would fail too."""
    if _begun() is not None:
        faulthandler.cancel_dump_traceback_later()
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as lost:
        item.session.shouldstop = f"the device is lost after {item.nodeid}: {str(lost).splitlines()[0]}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (begun := _begun()) is not None and not session.shouldstop:
        _tell(begun, ALL_RAN)


def _begun() -> Path | None:
    named = os.environ.get(BEGUN_TESTS)
    return Path(named) if named else None


def _tell(begun: Path, line: str) -> None:
    with begun.open("a", encoding="utf-8") as lines:
        lines.write(f"{line}\n")
