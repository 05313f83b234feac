"""The engine and the sidecar of the demo, as the processes that a user would start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from driftguard.errors import DriftGuardError

SERVER = "demo"
DATA = "data"  # of the sidecar and its database, in the directory of a demo
CACHE_VARIABLE = "DRIFTGUARD_CACHE_DIR"
STOP_SECONDS = 15.0
POLL_SECONDS = 0.1
_TAIL_LINES = 15  # of a log, in an error message
_KEPT_PORTS: list[socket.socket] = []


class DemoFailed(DriftGuardError):
    """A stage of the demo failed; the message says which and why."""


@dataclass(slots=True)
class Process:
    """One child with its log file."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    _has_ended: bool = False

    @classmethod
    def start(cls, name: str, arguments: list[str], log: Path) -> Process:
        with log.open("ab") as out:
            popen = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,  # Ctrl-C only reaches the demo, which then stops them in order
            )
        return cls(name, popen, log)

    def wait_ready(self, url: str, seconds: float) -> None:
        """Polls `url` until it answers 200. Raises DemoFailed with the end of the log."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.popen.poll() is not None:
                raise DemoFailed(
                    f"the {self.name} ended with code {self.popen.returncode}:\n{self.log_tail()}"
                )
            try:
                if httpx.get(url, timeout=2.0, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(POLL_SECONDS)
        raise DemoFailed(f"the {self.name} was not ready after {seconds:.0f} s:\n{self.log_tail()}")

    def stop(self) -> None:
        """Ends it and what it started. May be called again, also where a signal interrupted it."""
        if self._has_ended:
            return
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):  # the group is empty
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self._has_ended = True

    def log_tail(self) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-_TAIL_LINES:])


def end_database(directory: Path) -> None:
    """Ends the demo's PostgreSQL where its sidecar could not. Nothing in it is kept."""
    try:
        process_id = int((directory / DATA / "postgres" / "postmaster.pid").read_text().split("\n", 1)[0])
        for _ in range(int(STOP_SECONDS / POLL_SECONDS)):
            os.kill(process_id, signal.SIGQUIT)
            time.sleep(POLL_SECONDS)
    except (OSError, ValueError):
        return  # it has ended


def _environment() -> dict[str, str]:
    """Without the user's settings: the demo's records and pages are not for the database and the receivers of
    theirs."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DRIFTGUARD_") or name == CACHE_VARIABLE
    }


def sidecar_config(
    directory: Path, engine_url: str, sidecar_url: str, webhooks: Sequence[str], alertmanagers: Sequence[str]
) -> str:
    """The demo's settings, in TOML: a short reference period, capture on, a short training that leaves enough
    for the gate to exclude a loss on the known text, and a page whatever the fall costs: on a machine that
    other work leaves meanwhile, answers come no slower after it."""
    return f"""
data_dir = "{directory / DATA}"
[[engines]]
server = "{SERVER}"
admin_url = "{engine_url}"
[capture]
enabled = true
[detection]
minimum_drop = 0.1
[retraining]
aim_requests = 128
wait_seconds = 300
heldout_fraction = 0.3
steps = 80
threads = 1
[alerting]
page_slowdown = 0.0
external_url = "{sidecar_url}"
webhook_urls = {list(webhooks)}
alertmanager_urls = {list(alertmanagers)}
"""


def start_sidecar(directory: Path, url: str, config: str) -> Process:
    """`config`: in TOML. All files are in `directory`."""
    file = directory / "driftguard.toml"
    file.write_text(config, encoding="utf-8")
    arguments = ["driftguard", "serve", "--config", str(file), "--port", _port(url)]
    return Process.start("sidecar", arguments, directory / "sidecar.log")


def start_engine(
    directory: Path, url: str, sidecar_url: str | None, method: str = "draft_model", *, name: str = "engine"
) -> Process:
    """Starts an engine with the bundled models, of which that of `method` drafts. All files are in
    `directory`. Without a sidecar it records and captures nothing."""
    arguments = [
        *("driftguard_engine", "--port", _port(url), "--server-name", SERVER),
        *("--drafter", method, "--num-speculative-tokens", "3", "--threads", "1"),
        *("--state-dir", str(directory / name)),
    ]
    if sidecar_url:
        spool = str(directory / "spool")
        arguments += ["--sidecar", sidecar_url, "--spool-dir", spool, "--capture-fraction", "1.0"]
    return Process.start(name, arguments, directory / f"{name}.log")


def _port(url: str) -> str:
    return url.rsplit(":", 1)[1]


def free_url() -> str:
    """The URL of a server on this machine, with a port of `free_port`."""
    return f"http://127.0.0.1:{free_port()}"


def free_port() -> int:
    """A port on loopback, reserved for a server of this process or its children until this process ends.

    Connections to it are refused until a server listens; the server may stop and start again. A port that was
    only free a moment ago could become the local port of any outgoing connection. The server
    must set SO_REUSEADDR, as asyncio, uvicorn, PostgreSQL and Go do (socket(7)).
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    _KEPT_PORTS.append(kept)
    port: int = kept.getsockname()[1]
    return port
