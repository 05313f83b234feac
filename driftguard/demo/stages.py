"""The stages of the demo. Nothing is decided here: the stages send traffic, and read the state of engine and
sidecar through their APIs. Speeds are compared at the end, in turns, on engines of their own: what the
sidecar watches is not disturbed by it, and what else the machine does slows all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import httpx

from driftguard.demo.processes import SERVER, DemoFailed
from driftguard.demo.receiver import Receiver
from driftguard.demo.scenes import OF_MODELS, Scene
from driftguard.demo.sidecar_client import SidecarClient, wait_for
from driftguard.demo.speeds import Change, change
from driftguard.demo.traffic import Answer, Load, Traffic, acceptance_rate
from driftguard.demo.turns import TURNS, SetUp, measure, put_into_service
from driftguard.demo.view import Screen, Stage

BASELINE_SECONDS = 240.0  # without a percent more
MIX_REQUESTS = 100
INCIDENT_SECONDS = 300.0
ANSWERS_SECONDS = 180.0  # limits, not delays: a slow machine must succeed too
PAGE_SECONDS = 120.0
RETRAIN_SECONDS = 480.0
RECOVERY_SECONDS = 180.0
REFERENCE_REQUESTS = 30  # without speculation
CORPUS_REQUESTS = 200
MEASURED_REQUESTS = 100  # at the end
SCORING = "scoring requests captured before and after the fall: is it the traffic, or the engine?"
WITHOUT = "without speculation"
BACKGROUND_PAUSE_SECONDS = 1.0  # between requests of one worker while the draft trains on the same cores


@dataclass(slots=True)
class Facts:
    """All measurements of the demo; `driftguard demo --json` writes them."""

    seed: int
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    acceptance: dict[str, dict[str, float | None]] = field(default_factory=dict)
    tokens_per_second: dict[str, list[float]] = field(default_factory=dict)  # of each turn
    changes: dict[str, Change] = field(default_factory=dict)
    requests: int = 0
    failed_requests: int = 0
    happened: bool = False


@dataclass(slots=True)
class Loop:
    """The context of the stages."""

    screen: Screen
    traffic: Traffic
    sidecar: SidecarClient
    receiver: Receiver | None
    alertmanager_url: str | None
    facts: Facts
    scene: Scene = OF_MODELS

    def measure(self, name: str, answers: list[Answer]) -> None:
        """Acceptance per route of these answers, under this name."""
        self.facts.acceptance[name] = {
            route: acceptance_rate([answer for answer in answers if answer.route == route])
            for route in self.scene.routes
        }

    def wait_for_answers(self, count: int, seconds: float) -> list[Answer]:
        """The next `count` answers from now on."""
        start = len(self.traffic.answers)
        wait_for(
            f"{count} answers", seconds, lambda: True if len(self.traffic.answers) >= start + count else None
        )
        return self.traffic.answers[start : start + count]


def without_speculation(loop: Loop, stage: Stage) -> dict[str, Any]:
    """The same engine without a draft, so that the sidecar knows what speculation gives."""
    loop.traffic.load = Load(loop.scene.weights, loop.scene.known, speculation=False)
    loop.traffic.start()
    answers = loop.wait_for_answers(REFERENCE_REQUESTS, ANSWERS_SECONDS)
    loop.traffic.pause()
    loop.measure(WITHOUT, answers)
    stage.note = f"{len(answers)} requests, so that the sidecar can tell what speculation gives"
    return {"requests": len(answers)}


def first_corpus(loop: Loop, stage: Stage) -> dict[str, Any]:
    """Of known traffic, by a retraining that was asked for."""
    start = len(loop.traffic.answers)
    loop.traffic.load = Load(loop.scene.weights, loop.scene.known)
    loop.traffic.resume()
    loop.wait_for_answers(CORPUS_REQUESTS, ANSWERS_SECONDS)
    time.sleep(2.0)  # the last of them must have been stored
    loop.sidecar.retrain(SERVER)

    def ended() -> dict[str, Any] | None:
        run = loop.sidecar.newest_run()
        if run is None:
            return None
        stage.note = run["state"]
        if run["state"] in ("rejected", "failed", "nothing_to_do"):
            raise DemoFailed(f"the first corpus: {run['state']}: {run['reason']}")
        return run if run["state"] in ("watching", "promoted") else None

    run = wait_for("a first corpus", RETRAIN_SECONDS, ended)
    stage.note = f"corpus {run['candidate_version']}, of {len(loop.traffic.answers) - start} answers"
    return {"run_id": run["id"], "version": run["candidate_version"]}


def baseline(loop: Loop, stage: Stage) -> dict[str, Any]:
    """Traffic that the draft knows, until every route has a baseline."""
    start = len(loop.traffic.answers)
    loop.traffic.load = Load(loop.scene.weights, loop.scene.known)
    loop.traffic.resume()

    def ready() -> dict[str, Any] | None:
        stream = loop.sidecar.stream_in_service()
        segments = stream["segments"] if stream else []
        verdicts = {item["segment"]: item["verdict"] for item in segments}
        needed = [item["requests"] / max(item["requests"] + item["requests_needed"], 1) for item in segments]
        stage.part = min(needed, default=0.0) if len(segments) >= len(loop.scene.judged) else 0.0
        stage.note = "  ".join(
            f"{route}: {verdicts.get(route, 'no data yet')}" for route in loop.scene.judged
        )
        return (
            stream
            if stream
            and all(verdicts.get(route) in ("steady", "off_baseline") for route in loop.scene.judged)
            else None
        )

    loop.screen.state = "learning the baseline"
    stream = wait_for("a baseline of every route", BASELINE_SECONDS, ready, lambda: stage.part or 0.0)
    answers = loop.traffic.answers[start:]
    loop.measure("before", answers)
    loop.screen.state = "steady"
    stage.note = f"{len(answers)} requests"
    return {"requests": len(answers), "draft_version": stream["draft_version"]}


def mix_shift(loop: Loop, stage: Stage) -> dict[str, Any]:
    """Another mix of the same routes: the aggregate acceptance changes, and no alarm may be raised."""
    loop.traffic.load = Load(loop.scene.shifted, loop.scene.known)
    answers = loop.wait_for_answers(MIX_REQUESTS, ANSWERS_SECONDS)
    time.sleep(2.0)  # the last of them must have been folded before `no incident` means something
    incidents = loop.sidecar.incidents()
    if incidents:
        raise DemoFailed(f"a shift of the mix alone opened an incident: {incidents[0]['summary']}")
    aggregate = acceptance_rate(answers)
    stage.note = f"{len(answers)} requests, aggregate acceptance {aggregate or 0:.2f}: no incident"
    return {"requests": len(answers), "incidents": 0, "aggregate_acceptance": aggregate}


def drift(loop: Loop, stage: Stage) -> dict[str, Any]:
    """One route receives text that the draft has never seen; the detector is not informed of it."""
    loop.traffic.load = Load(loop.scene.weights, loop.scene.drifted)
    shifted_at, answered_before = time.time(), len(loop.traffic.answers)
    loop.screen.state = "traffic has shifted; the detector is not informed"

    def examined() -> dict[str, Any] | None:
        falls = loop.sidecar.incidents("down")
        return next((incident for incident in falls if incident["diagnosis"] is not None), None)

    incident = wait_for("an incident", INCIDENT_SECONDS, examined)
    loop.measure("during", loop.traffic.answers[answered_before:])
    loop.screen.state = f"incident: {incident['summary']}"
    segments = [segment["segment"] for segment in incident["segments"]]
    kinds = loop.sidecar.record_kinds()
    delay, error = (
        kinds[: incident[f"{name}_record"]].count("request") - answered_before
        for name in ("opened", "change_point")
    )
    since = datetime.fromisoformat(incident["since"]).timestamp()
    stage.note = (
        f"in {', '.join(segments)}, {delay} requests after the shift; "
        f"change point {since - shifted_at:+.1f} s from the true moment"
    )
    if segments[0] != "code":
        raise DemoFailed(f"the incident names {segments[0]!r} first, but 'code' has changed")
    return {
        "incident_id": incident["id"],
        "true_shift_at": shifted_at,
        "true_shift_after_requests": answered_before,
        "delay_requests": delay,
        "since": since,
        "since_error_seconds": since - shifted_at,
        "change_point_error_requests": error,
        "summary": incident["summary"],
        "segments": incident["segments"],
    }


def page(loop: Loop, stage: Stage) -> dict[str, Any]:
    """The page must arrive at the pager."""
    if loop.alertmanager_url:
        alert = wait_for("an alert in Alertmanager", PAGE_SECONDS, _alert_at(loop))
        stage.note = f"Alertmanager holds {alert['labels']['alertname']}"
        return {"through": loop.alertmanager_url, "summary": alert["annotations"]["summary"]}
    receiver = loop.receiver
    if receiver is None:
        raise DemoFailed("neither a webhook receiver nor an Alertmanager was set up")
    _, document = wait_for("a page", PAGE_SECONDS, lambda: next(iter(receiver.pages), None))
    stage.note = document["summary"]
    return {"through": "webhook", "summary": document["summary"], "url": document["url"]}


def _alert_at(loop: Loop) -> Callable[[], dict[str, Any] | None]:
    """Looks for the alert of the demo's incident: an Alertmanager may have those of other sidecars."""
    url, incident_id = (
        f"{(loop.alertmanager_url or '').rstrip('/')}/api/v2/alerts",
        loop.facts.stages["drift"]["incident_id"],
    )

    def look() -> dict[str, Any] | None:
        alerts = httpx.get(url, timeout=5.0).json()
        return next((alert for alert in alerts if alert["labels"].get("incident") == incident_id), None)

    return look


def retrain(loop: Loop, stage: Stage) -> dict[str, Any]:
    """The sidecar collects, distils, gates and promotes; requests continue meanwhile."""
    start = len(loop.traffic.answers)
    told: list[str] = []
    first = loop.facts.stages.get("first_corpus", {}).get("run_id")

    def tell(state: str, text: str) -> None:
        if state not in told:
            told.append(state)
            loop.screen.step(text)

    def ended() -> dict[str, Any] | None:
        run = loop.sidecar.newest_run()
        if run is None or run["id"] == first:
            tell("scoring", SCORING)
            stage.note = f"{len(loop.traffic.answers) - start} more requests"
            return None
        if run["state"] == "nothing_to_do":
            tell("nothing_to_do", f"retraining waits: {run['reason']}")
            stage.note = f"{len(loop.traffic.answers) - start} more requests"
            return None
        loop.traffic.pause_seconds = BACKGROUND_PAUSE_SECONDS
        tell(run["state"], f"retraining: {run['state']}")
        stage.note = run["state"]
        if run["state"] == "training" and (progress := run["progress"]):
            step, steps = progress["step"], progress["steps"]
            stage.part = step / steps
            stage.note = f"training, step {step} of {steps}"
            quarter = 4 * step // steps
            if quarter > 0:
                tell(f"quarter {quarter}", f"retraining: {stage.note}")
        if run["state"] in ("rejected", "failed", "rolled_back"):
            raise DemoFailed(f"the retraining ended as {run['state']}: {run['reason']}")
        return run if run["state"] in ("watching", "promoted") else None

    run = wait_for("a promotion", RETRAIN_SECONDS, ended)
    loop.traffic.pause_seconds = 0.0
    gate = run["numbers"]["gate"]
    stage.note = f"draft {run['candidate_version']} promoted by the gate"
    return {"run_id": run["id"], "candidate_version": run["candidate_version"], "gate": gate}


def recovery(loop: Loop, stage: Stage) -> dict[str, Any]:
    """The promoted draft is watched on live traffic; the incident says how far acceptance comes back with
    it, and closes when that is all the way."""
    incident_id = loop.facts.stages["drift"]["incident_id"]
    loop.screen.state = "watching the promoted draft"

    def recovered() -> dict[str, Any] | None:
        incident = loop.sidecar.incident(incident_id)
        return incident if incident["state"] in ("recovered_in_part", "resolved") else None

    wait_for("a recovery", RECOVERY_SECONDS, recovered)
    loop.measure("after", loop.wait_for_answers(MEASURED_REQUESTS, ANSWERS_SECONDS))
    incident = loop.sidecar.incident(incident_id)
    state = incident["state"].replace("_", " ")
    loop.screen.state = f"incident {state}"
    stage.note = f"{state}; {incident['transitions'][-1]['reason']}"
    return {
        "state": state,
        "half_recovery": incident["half_recovery"],
        "transitions": incident["transitions"],
    }


IdleEngines = Callable[[int], AbstractContextManager[list[str]]]  # count -> addresses


def compare_speeds(idle_engines: IdleEngines, loop: Loop, stage: Stage) -> dict[str, Any]:
    """Without speculation, and before, during and after the repair: in turns, with the drafts and the traffic
    of then, on an engine for each draft."""
    loop.screen.state = "comparing speeds, in turns"
    loop.traffic.pause()
    old = loop.facts.stages["baseline"]["draft_version"]
    new = loop.facts.stages["retrain"]["candidate_version"]
    known, drifted = (Load(loop.scene.weights, domains) for domains in (loop.scene.known, loop.scene.drifted))
    stage.note = "starting an engine for each draft"

    def on_turn(turn: int) -> None:
        stage.part = turn / TURNS
        stage.note = f"turn {turn} of {TURNS}"

    with idle_engines(2) as (old_url, new_url):
        for url, version in ((old_url, old), (new_url, new)):
            put_into_service(url, version, loop.sidecar.draft_directory(version))
        set_ups = [
            SetUp(WITHOUT, old_url, replace(known, speculation=False)),
            SetUp("before", old_url, known),
            SetUp("during", old_url, drifted),
            SetUp("after", new_url, drifted),
        ]
        speeds = measure(loop.traffic, set_ups, on_turn)
    loop.facts.tokens_per_second = speeds
    loop.facts.changes = {
        name: change(each, speeds["before"]) for name, each in speeds.items() if name != "before"
    }
    loop.facts.changes["speculation"] = change(speeds["before"], speeds[WITHOUT])
    loop.facts.changes["repair"] = change(speeds["after"], speeds["during"])
    stage.note = f"{TURNS} turns"
    return {"turns": TURNS}
