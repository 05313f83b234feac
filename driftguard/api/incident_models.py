"""Shapes of the answers about incidents."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import msgspec
from pydantic import Field

from driftguard.alerting.destination import shown
from driftguard.api.actions import ActionModel
from driftguard.api.status_models import POSITIONS, FrozenModel, StreamInfo
from driftguard.cost import Cost
from driftguard.diagnosis import CONFIDENCE_MEANS, Cause, Confidence
from driftguard.incident_lifecycle import State
from driftguard.incidents import aftermath
from driftguard.incidents.aftermath import Aftermath, HalfRecovery
from driftguard.incidents.message import cost_percent, summary
from driftguard.records.documents.incident import ChangedSegment, IncidentEvidence, positions_of
from driftguard.records.positions import Positions
from driftguard.store.tables import Incident, IncidentTransition, Notification, Stream


class FactModel(FrozenModel):
    about: str = Field(description="probes, configuration, mix, queries, quality or target.")
    text: str
    numbers: dict[str, float | int | str | None]


class ExampleModel(FrozenModel):
    """A captured request that is typical of the new traffic; present only while captures are kept."""

    record_id: UUID
    prompt_token_ids: list[int] | None = Field(
        description="null where captured text needs an API key and none was sent."
    )


class DiagnosisModel(FrozenModel):
    cause: Cause
    confidence: Confidence
    confidence_means: str = Field(examples=[CONFIDENCE_MEANS["high"]])
    summary: str = Field(examples=["the traffic moved (new topic)"])
    reason: str
    facts: list[FactModel] = Field(description="The evidence, each piece in words and numbers.")
    missing: list[str] = Field(description="Evidence that was missing, and how to have it next time.")
    recommended_action: str
    confirmed_by: str = Field(
        description="The one command that would confirm the cause; empty in diagnoses of older versions."
    )
    retrain: bool = Field(description="The cause calls for a new draft.")
    awaits_probes: bool = Field(description="The canary probes have yet to be replayed since the change.")
    diagnosed_at: datetime
    examples: list[ExampleModel] = Field(description="Of one incident only; empty in a list of incidents.")

    @classmethod
    def of(cls, incident: Incident, examples: Sequence[ExampleModel] = ()) -> DiagnosisModel | None:
        if incident.diagnosis is None:
            return None
        known = {**msgspec.to_builtins(incident.diagnosis), "examples": examples}
        means = CONFIDENCE_MEANS[incident.diagnosis.confidence]
        return cls.model_validate({**known, "confidence_means": means})


class IncidentModel(FrozenModel):
    id: UUID
    stream: StreamInfo
    state: State
    direction: Literal["down", "up", "slower"] = Field(
        description="down, up: of acceptance. slower: of goodput, at the same load or against no "
        "speculation; `evidence.goodput` says which."
    )
    severity: Literal["critical", "warning", "info"]
    summary: str
    opened_at: datetime
    since: datetime = Field(description="When acceptance or goodput changed, by the change point's record.")
    since_interval: tuple[datetime, datetime]
    change_point_record: int = Field(description="Running number of the first record after the change.")
    opened_record: int = Field(description="Running number of the record at which the alarm was raised.")
    acceptance_before: float = Field(
        description="Of the changed segments, as it was tested: what the requests since the change point "
        "would have accepted at their length and hour (`evidence.adjusted`). As counted where the target was "
        "replaced, and of an incident of goodput: what acceptance was before tokens came slower.",
        examples=[0.74],
    )
    acceptance_after: float = Field(
        description="The mean per request since the change point, until the alarm.", examples=[0.58]
    )
    positions: Positions = Field(description=POSITIONS, examples=["all"])
    tokens_per_second_before: float | None
    tokens_per_second_after: float | None
    cost_percent: float | None
    cost: Cost | None = Field(
        description="now, before, lost: of the change, as it was measured first. All else: as last measured "
        "while the incident was open."
    )
    segments: tuple[ChangedSegment, ...] = Field(description="Changed segments, strongest evidence first.")
    evidence: IncidentEvidence
    diagnosis: DiagnosisModel | None = Field(
        description="The cause; null until the incident has been examined, which is repeated until it "
        "succeeds."
    )
    resolved_at: datetime | None
    resolution: str | None
    aftermath: Aftermath | None = Field(
        description="How long it lasted, when it was detected and mitigated, what it cost in tokens; null "
        "while it is open."
    )
    half_recovery: HalfRecovery | None = Field(
        description="When half of the fall was shown to be won back: since the move was confirmed, "
        "opened_at, and since the draft came into service; null where it is not shown, or no draft was "
        "promoted for it."
    )
    level_accepted: bool = Field(description="It was resolved because the new level is normal.")

    @classmethod
    def of(cls, incident: Incident, stream: Stream) -> IncidentModel:
        return cls.model_validate(_facts(incident, stream))


class TransitionModel(FrozenModel):
    from_state: str | None
    to_state: str = Field(description="As from_state where only the severity was raised.")
    severity: str | None = Field(description="From then on: of an opening, or raised; else null.")
    reason: str
    at: datetime


class NotificationModel(FrozenModel):
    destination: str
    event: str
    severity: str
    created_at: datetime
    delivered_at: datetime | None
    attempts: int
    last_error: str | None
    in_settings: bool = Field(
        description="Whether this sidecar posts there. What was not delivered to a destination that was "
        "removed from the settings of all, or has another address there, is not posted any more."
    )

    @classmethod
    def of(cls, row: Notification, destinations: Collection[str]) -> NotificationModel:
        """`destinations`: those in the settings, by their identities."""
        return cls(
            in_settings=row.destination in destinations,
            destination=shown(row.destination),
            event=row.event,
            severity=row.severity,
            created_at=row.created_at,
            delivered_at=row.delivered_at,
            attempts=row.attempts,
            last_error=row.last_error,
        )


class IncidentDetail(IncidentModel):
    actions: list[ActionModel] = Field(
        description="What could be done now, in a fixed order, with what each gains; one is the best. "
        "Empty once it is resolved."
    )
    transitions: list[TransitionModel]
    notifications: list[NotificationModel]

    @classmethod
    def with_history(
        cls,
        incident: Incident,
        stream: Stream,
        transitions: list[IncidentTransition],
        notifications: list[Notification],
        destinations: Collection[str],
        examples: Sequence[ExampleModel],
        actions: Sequence[ActionModel],
    ) -> IncidentDetail:
        return cls(
            **{**_facts(incident, stream), "diagnosis": DiagnosisModel.of(incident, examples)},
            actions=list(actions),
            transitions=[TransitionModel.model_validate(item) for item in transitions],
            notifications=[NotificationModel.of(item, destinations) for item in notifications],
        )


class IncidentPage(FrozenModel):
    incidents: list[IncidentModel]
    next_cursor: str | None = Field(description="Pass as `cursor` for the next page; null at the end.")


def _facts(incident: Incident, stream: Stream) -> dict[str, Any]:
    names = ("id", "state", "direction", "severity", "opened_at", "acceptance_before", "acceptance_after")
    more = ("tokens_per_second_before", "tokens_per_second_after", "segments", "evidence", "resolved_at")
    return {
        **{name: getattr(incident, name) for name in (*names, *more, "resolution", "level_accepted")},
        "stream": StreamInfo.model_validate(stream),
        "summary": summary(incident, stream),
        "positions": positions_of(incident.segments),
        "since": incident.change_point_at,
        "since_interval": (incident.interval_start_at, incident.interval_end_at),
        "change_point_record": incident.change_point_seq,
        "opened_record": incident.opened_seq,
        "cost_percent": cost_percent(incident),
        "cost": incident.evidence.cost,
        "diagnosis": DiagnosisModel.of(incident),
        "aftermath": aftermath.of(incident),
        "half_recovery": aftermath.half_recovery(incident),
    }
