"""Seconds from the detector's alarm to the page at the receiver, through real Prometheus and Alertmanager.

python -m tests.benchmarks.bench_page_latency [--drifts N]

Nothing is hastened: rules and routes as committed in alerts/, intervals of deploy/compose/prometheus.yml.
Each drift is of a server of its own, and comes at another moment of the scrape interval. The alarm is the
incident's `opened_at`; the page is what PagerDuty or Slack would be sent. Both ways are measured at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import httpx

from driftguard.demo.processes import free_port
from tests.alerting.http_receiver import Receiver, http_receiver, wait_until
from tests.alerts.committed import ALERTMANAGER, RULES, load
from tests.benchmarks.bench_memory import wait_ready
from tests.deploy.committed import DEPLOY
from tests.integration import servers
from tests.integration.committed_config import hastened_alertmanager, hastened_rules
from tests.integration.servers import running_alertmanager, running_prometheus
from tests.pipeline.sidecar import post
from tests.pipeline.traffic import Traffic

GOOD: Final = {"code": 0.75, "english": 0.7, "german": 0.7}
BAD: Final = {"code": 0.4, "english": 0.35, "german": 0.35}
RULE_WAY: Final = "Prometheus, the rules, Alertmanager"
WAYS: Final = {
    RULE_WAY: "DriftGuardAcceptanceDrift",
    "the sidecar's own post to Alertmanager": "DriftGuardIncident",
}
APART: Final = (5**0.5 - 1) / 2  # of a scrape interval: the moments spread evenly over it, however many
PATIENCE_SECONDS: Final = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drifts", type=int, default=12)
    options = parser.parse_args()
    if servers.PROMETHEUS is None or servers.ALERTMANAGER is None:
        print("not measured: needs prometheus and Alertmanager on the PATH")
        return
    intervals = load(DEPLOY / "compose" / "prometheus.yml")["global"]
    interval = float(intervals["scrape_interval"].removesuffix("s"))
    print(shipped(intervals), flush=True)
    for way, seconds in measure(options.drifts, intervals, interval).items():
        print(
            f"{way}: {statistics.median(seconds):.1f} s in the median of {len(seconds)} drifts, "
            f"{max(seconds):.1f} s at worst ({max(seconds) / interval:.1f} scrape intervals)"
        )


def shipped(intervals: Mapping[str, str]) -> str:
    """The waits that the committed files set on the way of a drift."""
    rule_group = next(
        group
        for group in load(RULES)["groups"]
        if any(rule.get("alert") == WAYS[RULE_WAY] for rule in group["rules"])
    )
    judged = rule_group.get("interval", intervals["evaluation_interval"])
    route = load(ALERTMANAGER)["route"]
    waits = {item.get("group_wait", route["group_wait"]) for item in route["routes"][1:]}
    return (
        f"scrape interval {intervals['scrape_interval']}, the rule is judged every {judged}, "
        f"group_wait {' or '.join(sorted(waits))}"
    )


def measure(drifts: int, intervals: Mapping[str, str], interval: float) -> dict[str, list[float]]:
    """Way -> seconds from the alarm to the page, per drift."""
    names = [f"chat-{number:02d}" for number in range(drifts)]
    with tempfile.TemporaryDirectory() as place, http_receiver() as pager:
        directory = Path(place)
        config = hastened_alertmanager(1, pager.url)
        with (
            running_alertmanager(made(directory / "alertmanager"), config) as alertmanager,
            serving(made(directory / "sidecar"), alertmanager) as sidecar,
            running_prometheus(
                made(directory / "prometheus"),
                [str(sidecar.base_url)],
                hastened_rules(1),
                [alertmanager],
                intervals,
            ),
        ):
            let_drift(sidecar, names, interval)
            wait_until(
                lambda: all(pages(pager, alert, name) for alert in WAYS.values() for name in names),
                "every page",
                PATIENCE_SECONDS,
            )
            found = sidecar.get("/api/v1/incidents").json()["incidents"]
        alarms = {item["stream"]["server"]: datetime.fromisoformat(item["opened_at"]) for item in found}
        return {
            way: [(pages(pager, alert, name)[0] - alarms[name]).total_seconds() for name in names]
            for way, alert in WAYS.items()
        }


def let_drift(sidecar: httpx.Client, names: list[str], interval: float) -> None:
    """Teaches every server's baseline, then lets one after the other drift."""
    traffic = {}
    for number, name in enumerate(names):
        start = datetime.now(UTC) - timedelta(minutes=5)
        traffic[name] = Traffic(seed=number, start=start, seconds_apart=0.09)
        post(sidecar, traffic[name].draw(1500, GOOD, server=name))
    wait_until(lambda: are_steady(sidecar, len(names)), "the baselines", PATIENCE_SECONDS)
    begun = time.monotonic()
    for number, name in enumerate(names):
        time.sleep(max(0.0, begun + number * APART * interval - time.monotonic()))
        post(sidecar, traffic[name].draw(300, BAD, server=name))


def are_steady(sidecar: httpx.Client, streams: int) -> bool:
    found = sidecar.get("/api/v1/status").json()["streams"]
    return [item["verdict"] for item in found] == ["steady"] * streams


def pages(pager: Receiver, alert: str, server: str) -> list[datetime]:
    """When the pages of this alert about this server were taken, in order."""
    return [item.at for item in pager.taken() if alert in (text := json.dumps(item.body)) and server in text]


def made(directory: Path) -> Path:
    directory.mkdir()
    return directory


@contextmanager
def serving(directory: Path, alertmanager: str) -> Iterator[httpx.Client]:
    """A sidecar as its users start it, that finds a drift after a few hundred requests."""
    config = directory / "driftguard.toml"
    config.write_text(
        f"[alerting]\nalertmanager_urls = ['{alertmanager}']\n"
        "[detection]\nminimum_drop = 0.1\nfalse_alarm_days = 0.1\n"
    )
    port = str(free_port())
    command = [sys.executable, "-m", "driftguard", "serve", "--port", port, "--data-dir", str(directory)]
    log = (directory / "sidecar.log").open("ab")
    sidecar = subprocess.Popen([*command, "--config", str(config)], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as client:
            wait_ready(client)
            yield client
    finally:
        sidecar.terminate()
        sidecar.wait(30)
        log.close()


if __name__ == "__main__":
    main()
