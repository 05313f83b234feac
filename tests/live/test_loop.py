"""The whole loop beside a real vLLM with the plugin, unattended. `-s` prints a transcript."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from driftguard.records.documents.retraining_run import Comparison
from tests.alerting.http_receiver import http_receiver
from tests.live import clients
from tests.live.processes import Sidecar, of_all, sidecar
from tests.live.servers import (
    DRAFT,
    TARGET,
    Engine,
    K,
    live_updates,
    needs_vllm,
    running,
    speculative_config,
    vllm_server,
    with_plugin,
)

pytestmark = [needs_vllm, pytest.mark.live, pytest.mark.timeout(3_000)]

KNOWN = {"code": "python", "text": "prose"}
DRIFTED = {"code": "headers", "text": "prose"}
LONGEST_SECONDS = 1_200.0


@dataclass
class Traffic:
    """Requests of both segments in turns, from a thread of its own; it waits while the server restarts."""

    engine: Engine
    domains: dict[str, str]
    answered: int = 0
    errors: list[str] = field(default_factory=list)
    restarting: threading.Lock = field(default_factory=threading.Lock)
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            self._ask()
        except (openai.OpenAIError, httpx.HTTPError) as error:
            self.errors.append(repr(error))

    def _ask(self) -> None:
        served: dict[tuple[str, str], Iterator[Any]] = {}
        while not self.stopped.is_set():
            for segment, domain in self.domains.items():
                key = segment, domain
                if key not in served:
                    seed = len(served)
                    served[key] = clients.segment_of(self.engine.url, domain, segment, seed)
                with self.restarting:
                    next(served[key])
                self.answered += 1


@contextmanager
def under(traffic: Traffic) -> Iterator[None]:
    thread = threading.Thread(target=traffic.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        traffic.stopped.set()
        thread.join(30.0)


@pytest.mark.parametrize("way", ["restart", "live"])
def test_a_drift_is_found_paged_retrained_promoted_and_over(
    database_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], way: str
) -> None:
    begun, order = time.monotonic(), tmp_path / "order.json"

    def say(text: str) -> None:
        with capfd.disabled():
            print(f"{time.monotonic() - begun:5.0f} s  {text}", flush=True)

    engine = vllm_server(tmp_path, speculative_config(DRAFT))
    if way == "live":
        engine = live_updates(engine)
    with (
        http_receiver() as pager,
        sidecar(tmp_path / "sidecar", database_url, settings(engine, pager.url, order, way)) as beside,
        running(with_plugin(engine, beside.url)),
    ):
        traffic = Traffic(engine, KNOWN)
        with under(traffic):
            wait("a baseline of both segments", lambda: steady(beside), traffic)
            say(f"baseline after {traffic.answered} requests: {levels(beside)}")
            wait("canary probes", lambda: probed(beside), traffic)
            before, traffic.domains = traffic.answered, DRIFTED
            incident = wait("an incident", lambda: newest(beside, "incidents", "incidents"), traffic)
            say(f"incident {traffic.answered - before} requests later: {incident['summary']}")
            wait("the page", pager.taken, traffic)
            say(f"paged: {pager.taken()[0].body['summary']}")
            run = wait("a retraining", lambda: newest(beside, "retrain-runs", "runs"), traffic)
            diagnosis = newest(beside, "incidents", "incidents")["diagnosis"]
            say(f"cause: {diagnosis['summary']} ({diagnosis['confidence']})")
            if way == "restart":
                wait("the order", lambda: in_state(beside) or order.exists(), traffic)
                obey(engine, order, traffic)
                say("vLLM restarted with the new draft")
            run = wait("the promotion", lambda: in_state(beside, "watching", "promoted"), traffic)
            say(f"gate: {run['numbers']['gate']['reason']}")
            say(f"promoted {run['candidate_version']}: {run['reason']}")
            assert ("loaded without a restart" in run["reason"]) == (way == "live")
            over = wait("the end", lambda: resolved(beside, incident["id"]), traffic)
            say(f"resolved: {over['resolution']}")
            before = traffic.answered
            wait("more requests", lambda: traffic.answered > before + 600, traffic)
            say(f"{traffic.answered} requests; {levels(beside)}")
            records = [one for one in beside.records() if one.kind == "request" and one.drafted]
    serving = [one for one in records if one.draft_version == run["candidate_version"]]
    counts = of_all([one for one in serving if one.segment == "code"])
    live = counts["accepted"] / counts["drafted"]
    gain = msgspec.convert(run["numbers"]["gate"]["gain"], Comparison)
    requests = sum(one.segment == "code" for one in serving)
    low, high = gain.expected_range(live_requests=requests) or (0.0, 0.0)
    say(
        f"acceptance of code with the new draft: {gain.accepted_candidate:.3f} expected, {live:.3f} over "
        f"{requests} live requests ({low:.3f} to {high:.3f} expected of so many)"
    )
    assert low <= live <= high
    assert incident["direction"] == "down"
    assert [one["segment"] for one in incident["segments"]] == ["code"]
    assert over["state"] == "resolved"


def settings(engine: Engine, pager: str, order: Path, way: str) -> str:
    command = json.dumps([sys.executable, "-m", "tests.live.order", str(order)])
    update = f'update_url = "{engine.url}"' if way == "live" else ""
    return f"""
[[engines]]
server = "real"
target_directory = "{TARGET}"
draft_directory = "{DRAFT}"
num_speculative_tokens = {K}
acceptance_rule = "match"
{update}
[[probes.targets]]
server = "real"
url = "{engine.url}"
[probes]
interval_seconds = 120
[capture]
enabled = true
[detection]
minimum_drop = 0.1
[alerting]
webhook_urls = ["{pager}"]
page_slowdown = 0.02
[retraining]
aim_requests = 128
wait_seconds = 300
steps = 80
threads = 1
promote_timeout_seconds = 300
promote_command = {command}
"""


def obey(engine: Engine, order: Path, traffic: Traffic) -> None:
    """Restarts the server with the draft of the order, as an operator's own command would."""
    given = json.loads(order.read_text())
    with traffic.restarting:
        engine.stop()
        place = list(engine.command).index("--speculative-config")
        command = list(engine.command)
        command[place + 1] = speculative_config(given["DRIFTGUARD_DRAFT_PATH"])
        engine.command = command
        version = given["DRIFTGUARD_DRAFT_VERSION"]
        engine.environment = {**engine.environment, "DRIFTGUARD_VLLM_DRAFT_VERSION": version}
        engine.start()
    order.unlink()
    order.with_suffix(".done").touch()


def wait(what: str, look: Callable[[], Any], traffic: Traffic) -> Any:
    deadline = time.monotonic() + LONGEST_SECONDS
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        assert not traffic.errors, traffic.errors
        time.sleep(0.5)
    return found


def stream(beside: Sidecar) -> dict[str, Any]:
    streams = [one for one in beside.get("status")["streams"] if one["verdict"] != "replaced"]
    return dict(streams[0]) if streams else {"segments": []}


def levels(beside: Sidecar) -> dict[str, Any]:
    segments = stream(beside)["segments"]
    return {one["segment"]: round(one["now"]["rate"], 3) for one in segments if one["now"]}


def steady(beside: Sidecar) -> bool:
    verdicts = [one["verdict"] for one in stream(beside)["segments"]]
    return len(verdicts) == len(KNOWN) and set(verdicts) <= {"steady", "off_baseline"}


def probed(beside: Sidecar) -> bool:
    return any(record.kind == "probe" for record in beside.records())


def newest(beside: Sidecar, path: str, name: str) -> Any:
    found = beside.get(path)[name]
    return found[0] if found else None


def in_state(beside: Sidecar, *states: str) -> Any:
    run = newest(beside, "retrain-runs", "runs")
    assert run["state"] not in ("rejected", "failed", "rolled_back"), run["reason"]
    return run if run["state"] in states else None


def resolved(beside: Sidecar, incident: str) -> Any:
    found = beside.get(f"incidents/{incident}")
    return found if found["state"] == "resolved" else None
