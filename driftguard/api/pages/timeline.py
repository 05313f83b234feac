"""What happened in an incident, in order: found, told, acknowledged, retrained, promoted, recovered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from driftguard.api.drafts import DraftModel
from driftguard.api.incident_models import IncidentDetail
from driftguard.api.retraining import RunModel
from driftguard.records.documents.incident import told_as


@dataclass(frozen=True, slots=True)
class Event:
    """`word`: what it is, which also gives its colour; `link`: the page that says more."""

    at: datetime
    word: str
    text: str
    link: str | None = None


def timeline(incident: IncidentDetail, runs: Sequence[RunModel], drafts: Sequence[DraftModel]) -> list[Event]:
    """Oldest first. `runs`: the retrainings for it; `drafts`: what these made."""
    return sorted(_events(incident, runs, drafts), key=lambda event: event.at)


def _events(
    incident: IncidentDetail, runs: Sequence[RunModel], drafts: Sequence[DraftModel]
) -> Iterator[Event]:
    fell = "acceptance rose" if incident.direction == "up" else "acceptance fell"
    yield Event(incident.since, "changed", "tokens come slower" if incident.evidence.goodput else fell)
    for step in incident.transitions:
        became = told_as(step.from_state, step.to_state, step.severity)
        yield Event(step.at, "found" if step.from_state is None else became, step.reason)
    for told in incident.notifications:
        if told.delivered_at:
            yield Event(told.delivered_at, "told", f"{told.destination}: {told.event}, {told.severity}")
    made = {draft.retrain_run_id: draft for draft in drafts if draft.retrain_run_id and draft.promoted_at}
    for run in runs:
        link = f"/retraining/{run.id}"
        yield Event(run.started_at, "retraining", f"from draft {run.parent_version or 'unknown'}", link)
        if (draft := made.get(run.id)) and draft.promoted_at:
            yield Event(draft.promoted_at, "promoted", f"draft {draft.version} put into service", link)
        if run.ended_at and run.state != "promoted":
            yield Event(run.ended_at, run.state, run.reason or "", link)
