"""The second process of a draft model, whose engine is a process of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.engine.server.processes import engine_process
from tests.engine.server.serving import wait_until

pytestmark = pytest.mark.slow


def children(pid: int) -> list[int]:
    """Process ids, of those that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def test_it_ends_with_an_engine_that_is_killed(models: Path) -> None:
    with engine_process(models, "--drafter", "ssd") as (process, url, ready):
        assert ready.endswith(" method=ssd\n")
        asked = {"model": "target", "prompt": "abc", "max_tokens": 40, "seed": 3}
        httpx.post(f"{url}/v1/completions", json=asked).raise_for_status()
        told = httpx.get(f"{url}/admin/info").json()["ahead"]
        assert told["lookups"] > 0
        [worker] = children(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        wait_until(lambda: not Path(f"/proc/{worker}").exists(), "the end of the second process")


def test_it_goes_on_when_all_processes_of_the_engine_are_asked_to_end(models: Path) -> None:
    """As by systemd, and by a terminal: the engine lets its requests finish, with drafts."""
    with engine_process(models, "--drafter", "ssd") as (process, url, _):
        asked = {"model": "target", "prompt": "abc", "max_tokens": 40, "seed": 3}
        httpx.post(f"{url}/v1/completions", json=asked).raise_for_status()
        [worker] = children(process.pid)
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(worker, number)
        httpx.post(f"{url}/v1/completions", json=asked).raise_for_status()
        assert children(process.pid) == [worker]
        assert httpx.get(f"{url}/admin/info").json()["ahead"]["lost_workers"] == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        wait_until(lambda: not Path(f"/proc/{worker}").exists(), "the end of the second process")
