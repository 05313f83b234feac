"""The real Prometheus and the real Alertmanager, as child processes on free ports of loopback."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from driftguard.demo.processes import free_port
from tests.alerting.http_receiver import wait_until

PROMETHEUS = shutil.which("prometheus")
ALERTMANAGER = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")  # Debian's name first
TEAMS_SINCE = (0, 28)  # the version of Alertmanager that has a receiver for Microsoft Teams
HASTENED = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}

needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")
needs_alertmanager = pytest.mark.skipif(ALERTMANAGER is None, reason="Alertmanager is not installed")


def alertmanager_version() -> tuple[int, ...]:
    """Of the one that is installed; () where there is none."""
    if ALERTMANAGER is None:
        return ()
    told = subprocess.run([ALERTMANAGER, "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"version (\d+)\.(\d+)\.(\d+)", told.stdout + told.stderr)
    assert found, told
    return tuple(map(int, found.groups()))


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus and the few calls of its API that tests make."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query, as the API gives them: `metric` (labels) and `value` (time, text).

        Raises AssertionError with Prometheus's message if it refuses the expression.
        """
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression})
        assert answer.status_code == 200, f"{expression}: {answer.text}"
        return list(answer.json()["data"]["result"])

    def values(self, expression: str) -> list[float]:
        """The values of its samples; none while there are none, or while the newest scrape failed."""
        return [float(sample["value"][1]) for sample in self.query(expression)]

    def alerts(self) -> list[dict[str, Any]]:
        """Pending and firing ones, with `labels`, `annotations` and `state`."""
        return list(httpx.get(f"{self.url}/api/v1/alerts").json()["data"]["alerts"])

    def firing(self, alertname: str) -> list[dict[str, Any]]:
        return [
            alert
            for alert in self.alerts()
            if alert["labels"]["alertname"] == alertname and alert["state"] == "firing"
        ]


@contextmanager
def running_prometheus(
    directory: Path,
    targets: Sequence[str],
    rules: str = "groups: []",
    alertmanagers: Sequence[str] = (),
    intervals: Mapping[str, str] = HASTENED,
) -> Iterator[Prometheus]:
    """Scrapes the targets (base URLs) as job driftguard. `intervals`: of the configuration's `global`; by
    default it scrapes twice a second, and judges the rules as often."""
    assert PROMETHEUS is not None
    (directory / "rules.yaml").write_text(rules)
    (directory / "prometheus.yml").write_text(
        yaml.safe_dump(
            {
                "global": dict(intervals),
                "rule_files": ["rules.yaml"],
                "scrape_configs": [
                    {"job_name": "driftguard", "static_configs": [{"targets": _places(targets)}]}
                ],
                "alerting": {"alertmanagers": [{"static_configs": [{"targets": _places(alertmanagers)}]}]},
            }
        )
    )
    url = f"http://127.0.0.1:{free_port()}"
    arguments = [
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={url.removeprefix('http://')}",
        f"--rules.alert.resend-delay={intervals['scrape_interval']}",
    ]
    with running([PROMETHEUS, *arguments], directory / "prometheus.log", f"{url}/-/ready"):
        yield Prometheus(url)


@contextmanager
def running_alertmanager(
    directory: Path, config: str, *, port: int | None = None, peers: Sequence[int | None] = (None,)
) -> Iterator[str]:
    """Its URL. `peers`: gossip ports of its cluster, its own first; None: it is alone."""
    assert ALERTMANAGER is not None
    (directory / "alertmanager.yml").write_text(config)
    url = f"http://127.0.0.1:{port or free_port()}"
    own, *others = peers
    arguments = [
        f"--config.file={directory / 'alertmanager.yml'}",
        f"--storage.path={directory / 'data'}",
        f"--web.listen-address={url.removeprefix('http://')}",
        f"--cluster.listen-address={'' if own is None else f'127.0.0.1:{own}'}",
        *(f"--cluster.peer=127.0.0.1:{other}" for other in others),
    ]
    if own is not None:
        arguments += [
            "--cluster.gossip-interval=50ms",
            "--cluster.settle-timeout=1s",
            "--cluster.peer-timeout=1s",
            "--log.level=debug",
        ]
    with running([ALERTMANAGER, *arguments], directory / "alertmanager.log", f"{url}/-/ready"):
        yield url


@contextmanager
def running(command: Sequence[str], log: Path, ready: str) -> Iterator[None]:
    """The process, from when `ready` answers; its output is in `log`, and in the error if it never does."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_until(lambda: _answers(ready, process, log), f"{command[0]} to start")
        yield
    finally:
        process.terminate()
        process.wait()


def _places(urls: Sequence[str]) -> list[str]:
    return [url.rstrip("/").removeprefix("http://") for url in urls]


def _answers(url: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        return httpx.get(url).is_success
    except httpx.HTTPError:
        return False
