"""Worker processes: what holds beside the command (test_command.py)."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from driftguard.errors import BadSettings
from driftguard.proxy.listening import listeners_of

PROGRAM = """
import os
import select
from driftguard.errors import DriftGuardError
from driftguard.proxy.listening import listeners_of
from driftguard.proxy.workers import supervise

def work(worker):
    if worker.number == {failing}:
        raise OSError("no such device")
    worker.announce()
    select.select([worker.supervisor], [], [])
    os.write(1, b"alone\\n")  # in one piece: the workers share the pipe

try:
    supervise(listeners_of("127.0.0.1", 0, None, 2), work, lambda: print("ready", flush=True))
except DriftGuardError as error:
    print(error, flush=True)
"""


def _supervised(failing: int | None) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM.format(failing=failing)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_workers_stop_when_their_supervisor_is_killed() -> None:
    with _supervised(failing=None) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
        assert process.stdout.readlines() == ["alone\n", "alone\n"]


def test_a_worker_that_cannot_start_ends_the_proxy_with_an_error() -> None:
    with _supervised(failing=1) as process:
        said = process.communicate(timeout=60)[0]
        assert "worker 1 did not start" in said
        assert "no such device" in said
        assert "ready" not in said


@pytest.mark.parametrize("workers", [1, 2])
def test_an_address_of_a_host_that_this_machine_lacks_is_left_out_where_there_are_others(
    monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """As ::1 of localhost, in a container without IPv6."""
    lacking, known = "192.0.2.1", "127.0.0.1"  # the former is of no machine (RFC 5737)
    for addresses in ([lacking, known], [known, lacking], [lacking]):
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: found)
        if known not in addresses:
            with pytest.raises(BadSettings, match=r"proxy.port: cannot listen on localhost"):
                listeners_of("localhost", 0, None, workers)
            continue
        for each in listeners_of("localhost", 0, None, workers):
            assert [one.getsockname()[0] for one in each.traffic] == [known]
            each.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_port_that_another_proxy_has_is_not_shared_with_it(workers: int) -> None:
    others = listeners_of("127.0.0.1", 0, None, 2)
    try:
        with pytest.raises(BadSettings, match=rf"proxy.port: cannot listen on 127.0.0.1:{others[0].port}"):
            listeners_of("127.0.0.1", others[0].port, None, workers)
    finally:
        for other in others:
            other.close()
