"""How many cores this process may keep busy."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

OWN_GROUP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def usable_cores(own_group: Path = OWN_GROUP, groups: Path = GROUPS) -> int:
    """Cores that this process may run on, and no more than the CPU limits of its container allow; at least 1.

    Threads beyond such a limit make all of them stand still for the rest of each period. Limits of cgroups of
    version 1 are not read. Source: Linux, Documentation/admin-guide/cgroup-v2.rst, `cpu.max`.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min([cores, *_limits(own_group, groups)]))


def _limits(own_group: Path, groups: Path) -> Iterator[int]:
    """Whole cores that the process's own group and each one above it may use, where they are limited."""
    try:
        (path,) = (line[3:] for line in own_group.read_text().splitlines() if line.startswith("0::"))
    except (OSError, ValueError):
        return
    own = groups / path.lstrip("/")
    for group in (own, *own.parents):
        if not group.is_relative_to(groups):
            return
        try:
            quota, period = (group / "cpu.max").read_text().split()
        except (OSError, ValueError):  # the topmost has none
            continue
        if quota != "max":
            yield int(quota) // int(period)
