"""Gauges of drafts and retraining, which other processes change too: they follow the database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy.orm import Session

from driftguard.metrics import Metrics
from driftguard.metrics.labels import RUN_OUTCOMES
from driftguard.store import drafts, retrain_runs, status_queries
from driftguard.store.tables import RetrainRun

_WATCHED: Final = ("watching", "rolling_back")  # the draft serves, and its run has not ended
_WENT_WELL: Final = (*_WATCHED, "promoted", "nothing_to_do")


def refresh(session: Session, metrics: Metrics, places: set[tuple[str, str]]) -> None:
    """`places`: (server, target) of the streams with gauges of their own."""
    _show_runs(session, metrics, places)
    metrics.replace(
        metrics.retraining.stage,
        {(run.server, run.target, run.state): 1.0 for run in retrain_runs.unended(session)},
    )
    metrics.replace(
        metrics.retraining.drafts,
        {(server, target, state): count for server, target, state, count in drafts.counts(session)},
    )
    metrics.replace(
        metrics.retraining.draft_in_service_since,
        {
            (server, target, version): at.timestamp()
            for server, target, version, at in drafts.in_service_since(session)
        },
    )
    _show_gate(metrics, retrain_runs.last_judged(session))


def _show_runs(session: Session, metrics: Metrics, places: set[tuple[str, str]]) -> None:
    totals = sorted(status_queries.run_totals(session), key=lambda one: one.last_at)  # the newest comes last
    ended = [one for one in totals if one.state in RUN_OUTCOMES]
    counts = {(*place, outcome): 0 for place in places for outcome in RUN_OUTCOMES}
    for one in ended:
        key = (one.server, one.target, one.state)
        counts[key] = counts.get(key, 0) + one.runs
    newest = {(one.server, one.target, one.state): one.last_at for one in ended}
    metrics.retraining.set_ended_runs({key: (count, newest.get(key)) for key, count in counts.items()})
    metrics.replace(
        metrics.retraining.last_success,
        {(one.server, one.target): one.last_at.timestamp() for one in totals if one.state in _WENT_WELL},
    )
    outcomes = {(one.server, one.target): one.state for one in ended}
    outcomes |= {(one.server, one.target): one.state for one in totals if one.state in _WATCHED}
    metrics.replace(
        metrics.retraining.last_outcome,
        {(*place, last): 1.0 for place, last in outcomes.items() if last in RUN_OUTCOMES},
    )
    rejected = status_queries.rejected_in_a_row(session)
    metrics.replace(
        metrics.retraining.rejected_in_a_row,
        {place: float(rejected.get(place, 0)) for place in outcomes},
    )
    metrics.replace(
        metrics.retraining.last_run,
        {(one.server, one.target, one.trigger): one.last_at.timestamp() for one in ended},
    )


def _show_gate(metrics: Metrics, runs: Sequence[RetrainRun]) -> None:
    """`runs`: the last one of each place that the gate decided on."""
    decided = {(run.server, run.target): run.numbers.gate for run in runs if run.numbers and run.numbers.gate}
    both: dict[tuple[str, ...], float] = {}
    for place, decision in decided.items():
        parent, candidate = decision.gain.accepted_parent, decision.gain.accepted_candidate
        if parent is not None and candidate is not None:
            both[*place, "in_service"], both[*place, "candidate"] = parent, candidate
    metrics.replace(metrics.retraining.gate_acceptance, both)
    metrics.replace(
        metrics.retraining.gate_gain_lower,
        {place: decision.gain.lower for place, decision in decided.items()},
    )
    metrics.replace(
        metrics.retraining.gate_loss_upper,
        {
            place: max(-group.lower for group in decision.groups)
            for place, decision in decided.items()
            if decision.groups
        },
    )
    metrics.replace(
        metrics.retraining.gate_passed,
        {place: float(decision.promote) for place, decision in decided.items()},
    )
