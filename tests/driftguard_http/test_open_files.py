"""The limit of open files, in a process of its own: what a test raised it could not lower again."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from driftguard_http.open_files import raise_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
assert raise_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
print("limit", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "limit", "says"),
    [
        (256, 1_024, 1_024, ["open_files_limit_raised", "open_files_limit_is_low"]),
        (1_024, 10_000, 10_000, ["open_files_limit_raised"]),
        (9_000, 9_000, 9_000, []),
    ],
)
def test_the_soft_limit_becomes_the_hard_one(soft: int, hard: int, limit: int, says: list[str]) -> None:
    command = [sys.executable, "-c", PROGRAM, str(soft), str(hard)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"limit {limit}\n" in output
    events = ("open_files_limit_raised", "open_files_limit_is_low")
    assert [event for event in events if event in output] == says
