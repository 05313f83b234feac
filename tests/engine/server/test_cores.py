"""Which limits of CPU time decide how many cores the engine uses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from driftguard_engine.server.cores import usable_cores

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/\n", {"": "100000 100000\n"}, 1),  # as in a container
        ("0::/\n", {"": "max 100000\n"}, CORES),
        ("0::/\n", {"": "6400000 100000\n"}, CORES),  # more than there are
        ("0::/\n", {"": "199999 100000\n"}, 1),  # no whole second core
        ("0::/\n", {"": "20000 100000\n"}, 1),  # not even one
        ("0::/a.slice/b.service\n", {"a.slice": "150000 100000\n", "a.slice/b.service": "max 100000\n"}, 1),
        ("0::/a.slice/b.service\n", {}, CORES),
        ("4:memory:/\n0::/\n", {"": "100000 100000\n"}, 1),  # both versions
        ("4:cpu:/\n", {"": "100000 100000\n"}, CORES),  # the first version
        ("0::/\n", {"": "nonsense\n"}, CORES),
        (None, {}, CORES),
    ],
)
def test_cores(tmp_path: Path, own: str | None, limits: dict[str, str], expected: int) -> None:
    groups = tmp_path / "groups"
    for name, limit in limits.items():
        (groups / name).mkdir(parents=True, exist_ok=True)
        (groups / name / "cpu.max").write_text(limit)
    if own is not None:
        (tmp_path / "cgroup").write_text(own)
    assert usable_cores(tmp_path / "cgroup", groups) == expected
