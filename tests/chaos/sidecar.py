"""A sidecar, started as by its users, that can be killed; its response times and memory are measured."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from driftguard.demo.processes import free_port
from driftguard.settings import Settings

LOOK_SECONDS: Final = 0.1
UNANSWERED_SECONDS: Final = 5.0
START_SECONDS: Final = 90.0
STOP_SECONDS: Final = 60.0


def settings_of(data_dir: Path, database_url: str | None, **groups: Any) -> dict[str, Any]:
    """Settings in which a fall is found after some hundred requests."""
    found: dict[str, Any] = {"data_dir": str(data_dir), **groups}
    found["detection"] = {"minimum_drop": 0.1, "false_alarm_days": 0.1}
    if database_url is not None:
        found["database_url"] = database_url
    return found


class ChaosSidecar:
    """One sidecar on one port over many lives."""

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, Any],
        *,
        host: str = "127.0.0.1",
        descriptors: int | None = None,
        module: str = "driftguard",
    ) -> None:
        """`descriptors`: the most that it may open. `module`: what is run with `python -m`."""
        self.settings = Settings.model_validate({**settings, "host": host})
        self.url = f"http://127.0.0.1:{free_port()}"
        self._config = directory / "driftguard.toml"
        self._config.write_text(_toml(settings))
        self._arguments = ["serve", "--config", str(self._config), "--host", host]
        self._arguments += ["--port", self.url.rsplit(":", 1)[1]]
        self.module = module
        self._log = directory / "sidecar.log"
        self._descriptors = descriptors
        self._process: subprocess.Popen[bytes] | None = None
        self._serves = False

    @property
    def pid(self) -> int | None:
        """None while it does not run, or has not been ready yet."""
        process = self._process
        runs = self._serves and process is not None and process.poll() is None
        return process.pid if process is not None and runs else None

    def start(self) -> None:
        """Returns when it is ready."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.module, *self._arguments],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        if self._descriptors is not None:
            limits = (self._descriptors, self._descriptors)
            resource.prlimit(self._process.pid, resource.RLIMIT_NOFILE, limits)
        wait_for(self.is_ready, START_SECONDS, "the sidecar to be ready", self.log)
        self._serves = True

    def kill(self) -> None:
        assert self._process is not None
        self._serves = False
        self._process.kill()
        self._process.wait()

    def terminate(self) -> float:
        """Seconds from SIGTERM to its end, however it ended."""
        assert self._process is not None
        asked = time.monotonic()
        self._serves = False
        self._process.terminate()
        self._process.wait(STOP_SECONDS)
        return time.monotonic() - asked

    def is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (
            f"the sidecar ended with {self._process.returncode}: {self.log()}"
        )
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/readyz", timeout=UNANSWERED_SECONDS).status_code == 200
        return False

    def log(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])


@contextmanager
def running(sidecar: ChaosSidecar) -> Iterator[ChaosSidecar]:
    try:
        sidecar.start()
        yield sidecar
    finally:
        sidecar.kill()


@dataclass(slots=True)
class Watch:
    """What /healthz took (UNANSWERED_SECONDS where it did not answer), and the most memory."""

    seconds: list[float] = field(default_factory=list)
    unanswered: int = 0
    most_memory_mb: float = 0.0

    @property
    def p99_seconds(self) -> float:
        if len(self.seconds) < 2:
            return max(self.seconds, default=0.0)
        return statistics.quantiles(self.seconds, n=100, method="inclusive")[98]


@contextmanager
def watching(sidecar: ChaosSidecar) -> Iterator[Watch]:
    """Looks ten times a second, each time over a new connection, while the process runs."""
    watch, stopping = Watch(), threading.Event()

    def look() -> None:
        while not stopping.wait(LOOK_SECONDS):
            pid = sidecar.pid
            if pid is None:
                continue
            with suppress(psutil.NoSuchProcess):
                watch.most_memory_mb = max(watch.most_memory_mb, _peak_mb(pid))
            took = _healthz_seconds(sidecar.url)
            if sidecar.pid == pid:  # it was not killed meanwhile
                watch.seconds.append(took)
                watch.unanswered += took >= UNANSWERED_SECONDS

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        stopping.set()
        thread.join()


def _peak_mb(pid: int) -> float:
    """The peak of resident memory; a peak between two measurements counts too."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None
    found = next((line for line in status.splitlines() if line.startswith("VmHWM:")), None)
    return int(found.split()[1]) * 1_024 / 1e6 if found else 0.0


def _healthz_seconds(url: str) -> float:
    begun = time.monotonic()
    try:
        answer = httpx.get(f"{url}/healthz", timeout=UNANSWERED_SECONDS)
    except httpx.HTTPError:
        return UNANSWERED_SECONDS
    return time.monotonic() - begun if answer.status_code == 200 else UNANSWERED_SECONDS


def wait_for(condition: Any, seconds: float, what: str, log: Any = lambda: "") -> float:
    """Seconds that it took. Raises AssertionError after `seconds`."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, f"waited {seconds:.0f} s in vain for {what}\n{log()}"
        time.sleep(0.1)
    return time.monotonic() - begun


def _toml(settings: Mapping[str, Any]) -> str:
    """Of plain values, lists and groups of them: JSON's texts, numbers, booleans and lists are TOML's too."""
    plain = {name: value for name, value in settings.items() if not isinstance(value, Mapping)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in plain.items()]
    for name, group in settings.items():
        if isinstance(group, Mapping):
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in group.items())]
    return "\n".join(lines) + "\n"
