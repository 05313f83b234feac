"""A database in a network namespace of its own, whose packets can really be dropped.

Only TCP's timers notice that, which a relay on the same machine cannot simulate.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.chaos.sidecar import wait_for

OUTSIDE: Final = "10.231.77.1"
INSIDE: Final = "10.231.77.2"
PORT: Final = 5_432


class Namespace:
    """A network namespace by name; `drop` drops its outgoing packets, `restore` ends that."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, *command: str) -> None:
        _run("ip", "netns", "exec", self.name, *command)

    def drop(self) -> None:
        self.run("ip", "route", "add", "blackhole", f"{OUTSIDE}/32")

    def restore(self) -> None:
        self.run("ip", "route", "del", "blackhole", f"{OUTSIDE}/32")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def namespace() -> Iterator[Namespace | None]:
    """None where none can be made: that needs root, and iproute2."""
    name, link = f"driftguard-{os.getpid()}", f"dg{os.getpid()}"
    here = Namespace(name)
    try:
        _run("ip", "netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        yield None
        return
    try:
        _run("ip", "link", "add", f"{link}o", "type", "veth", "peer", "name", f"{link}i")
        _run("ip", "link", "set", f"{link}i", "netns", name)
        _run("ip", "addr", "add", f"{OUTSIDE}/30", "dev", f"{link}o")
        _run("ip", "link", "set", f"{link}o", "up")
        here.run("ip", "addr", "add", f"{INSIDE}/30", "dev", f"{link}i")
        here.run("ip", "link", "set", f"{link}i", "up")
        yield here
    finally:
        _run("ip", "netns", "del", name)  # and with it both ends of the link


@contextmanager
def relay_inside(here: Namespace, target: Path, log: Path) -> Iterator[str]:
    """host:port of a relay inside the namespace to a Unix socket, which all namespaces share."""
    command = ["ip", "netns", "exec", here.name, sys.executable, "-m", "tests.chaos.relay"]
    with log.open("ab") as out:
        process = subprocess.Popen([*command, str(target), INSIDE, str(PORT)], stdout=out, stderr=out)
    try:
        wait_for(lambda: b"listening" in log.read_bytes(), 30, "the relay to listen", log.read_text)
        yield f"{INSIDE}:{PORT}"
    finally:
        process.kill()
        process.wait()
