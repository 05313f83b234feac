"""Shapes of the answers about status and incidents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from driftguard.adapters.condition import Condition
from driftguard.alerting.message import cost_of, cost_percent, summary
from driftguard.cost import Cost
from driftguard.detection import Acceptance, Fleet, SegmentSummary, StreamSummary
from driftguard.detection.counting import SECONDS_PER_DAY
from driftguard.detection.findings import SessionsGiven, duration
from driftguard.diagnosis import CONFIDENCE_MEANS, Cause, Confidence
from driftguard.metrics import StreamVerdict
from driftguard.records import Fidelity
from driftguard.settings import DetectionSettings, FalseAlarmScope
from driftguard.store.tables import Incident, IncidentTransition, Notification, RetrainRun, Source, Stream


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, from_attributes=True)


class Rate(_Model):
    """Acceptance rate: sum of accepted / sum of drafted, with a 95% interval."""

    rate: float = Field(examples=[0.74])
    low: float = Field(examples=[0.72])
    high: float = Field(examples=[0.76])
    requests: int = Field(examples=[200])

    @classmethod
    def of(cls, acceptance: Acceptance | None) -> Rate | None:
        return cls.model_validate(acceptance) if acceptance else None


class NowAndBaseline(_Model):
    now: Rate | None = Field(description="Newest requests of the watched segments.")
    baseline: Rate | None = Field(description="The same segments while they were in control, in today's mix.")


class TokensPerSecond(_Model):
    """Per request while decoding: requests / sum of their times per output token."""

    now: float | None = Field(description="Last five minutes.", examples=[41.2])
    baseline: float | None = Field(
        description="Before the change while degraded, else the two hours before.", examples=[52.8]
    )
    cost_percent: float | None = Field(
        description="Part lost to the drift; null unless degraded.", examples=[22.0]
    )


class ExpectedDelayModel(_Model):
    """From a drop of acceptance to its alarm; half of the alarms come sooner."""

    drop: float = Field(examples=[0.05])
    requests: float | None = Field(
        description="Of the segment, or windows of its counter; null: not detectable.", examples=[118.0]
    )
    seconds: float | None = Field(
        description="At the segment's present traffic; null where that is not known.", examples=[7_080.0]
    )
    unit: Literal["requests", "windows"]
    text: str = Field(examples=["a drop of 0.05: about 118 requests (2.0 h)"])


class FalseAlarms(_Model):
    """How rare a false page is made: the expected time to one is at least this, while nothing changes."""

    requests: float = Field(description="A of the guarantee.", examples=[777_600.0])
    days: float | None = Field(
        description="The same at the present traffic; null until that is known.", examples=[90.0]
    )
    text: str = Field(examples=["at most one false page in 90 days (777,600 requests)"])

    @classmethod
    def of(cls, summary: StreamSummary, per_day: float | None) -> FalseAlarms:
        requests = summary.false_alarm_every
        days = requests / per_day if per_day else None
        told = f"{requests:,.0f} requests"
        text = f"{duration(days * SECONDS_PER_DAY)} ({told})" if days is not None else told
        return cls(requests=requests, days=days, text=f"at most one false page in {text}")


class SegmentStatus(_Model):
    segment: str = Field(examples=["german"])
    verdict: Literal["insufficient_data", "steady", "degraded", "improved"]
    requests: int
    requests_needed: int = Field(description="At least so many more until the segment is watched.")
    now: Rate | None
    baseline: Rate | None
    learning: str | None = Field(
        description="Why its present traffic is not watched yet; null once it is.",
        examples=["request, num_speculative_tokens 6: num_speculative_tokens changed from 4 to 6"],
    )
    baseline_reason: str | None = Field(
        description="Why the baseline in use was begun.", examples=["first baseline of the segment"]
    )
    expected_delays: list[ExpectedDelayModel] = Field(description="Empty until the segment is watched.")
    block_length: int = Field(
        description="Requests that count as one, because neighbours are alike; 1: each for itself."
    )

    @classmethod
    def of(cls, item: SegmentSummary, slower: float) -> SegmentStatus:
        """`slower`: the traffic that the expected delays were made for, as a part of the present one."""
        delays = [
            replace(delay, seconds=None if delay.seconds is None else delay.seconds * slower)
            for delay in item.expected_delays
        ]
        return cls(
            segment=item.segment,
            verdict=item.verdict,
            requests=item.requests,
            requests_needed=item.requests_needed,
            now=Rate.of(item.recent),
            baseline=Rate.of(item.baseline),
            learning=item.learning,
            baseline_reason=item.baseline_reason,
            block_length=item.block_length,
            expected_delays=[ExpectedDelayModel.model_validate(delay) for delay in delays],
        )


class StreamInfo(_Model):
    """A stream: (server, target, draft version, method)."""

    id: int
    server: str = Field(examples=["chat-eu-1"])
    target: str
    draft: str
    draft_version: str = Field(examples=["3f9c01d2ab44"])
    method: str = Field(examples=["draft_model"])


class LastRetrain(_Model):
    id: UUID
    state: str = Field(examples=["promoted"])
    trigger: str
    reason: str | None
    started_at: datetime
    ended_at: datetime | None
    candidate_version: str | None

    @classmethod
    def of(cls, run: RetrainRun | None) -> LastRetrain | None:
        return cls.model_validate(run) if run else None


class StreamStatusModel(StreamInfo):
    verdict: StreamVerdict = Field(
        description="relearning: the detector's state was stored by another version of DriftGuard."
    )
    text: str = Field(
        description="The verdict in one sentence.", examples=["Steady: acceptance 0.74, baseline 0.75."]
    )
    since: datetime | None
    in_service: bool
    draft_in_service: str
    acceptance: NowAndBaseline
    tokens_per_second: TokensPerSecond
    sample_size: int = Field(description="Requests folded by the detector.")
    requests_missing: int = Field(description="At least so many until the first segment is watched.")
    incident_id: UUID | None
    last_retrain: LastRetrain | None
    segments: list[SegmentStatus]
    cost: Cost | None = Field(description="Of speculation, and the best K; measured every few minutes.")
    cost_measured_at: datetime | None
    first_seen_at: datetime
    last_seen_at: datetime
    records_in_other: int = Field(description="Records whose segment was beyond the limit of 64.")
    sessions: SessionsGiven = Field(
        description="Do requests name their session? Where not, only neighbours are known to belong together."
    )
    windows_after_gap: int = Field(
        description="Windows of a counter that restarted or was missed: counted, never evidence."
    )
    requests_per_day: float | None = Field(
        description="Of the last day; of the first reference period until it is known for an hour, and "
        "where the last day had none. null before that."
    )
    false_alarms: FalseAlarms | None = Field(description="null before the first record is read.")


class FleetModel(_Model):
    """How many streams are watched, and what the rarity of false pages is a promise about."""

    streams: int = Field(description="In service, with speculation.")
    false_alarm_scope: FalseAlarmScope = Field(description="Whose rate is set: of each, or of all together.")
    false_alarm_factor: float = Field(
        description="What the A of the next stream to be named is multiplied by: N / k with the scope fleet."
    )
    text: str

    @classmethod
    def of(cls, fleet: Fleet, settings: DetectionSettings) -> FleetModel:
        together = settings.false_alarm_scope == "fleet"
        whose = "over all of them" if together else "of each"
        return cls(
            streams=fleet.streams,
            false_alarm_scope=settings.false_alarm_scope,
            false_alarm_factor=fleet.factor() if together and fleet.streams else 1.0,
            text=f"{fleet.streams} streams in service: while nothing changes, the first false page {whose} "
            f"is to be expected after {settings.false_alarm_days:g} days or more",
        )


class SourceModel(_Model):
    """A server whose metrics are scraped or pushed (OTLP), after the newest scrape or export."""

    server: str = Field(examples=["chat-eu-1"])
    kind: str = Field(description="The serving engine; unknown until it answered.", examples=["vllm"])
    url: str = Field(description="OTLP: its metrics are pushed.", examples=["http://chat-eu-1:8000/metrics"])
    fidelity: Fidelity | None = Field(
        description="How much to trust its counts: counter, or gauge (in part derived); null: not known.",
        examples=["counter"],
    )
    condition: Condition = Field(examples=["reporting"])
    detail: str = Field(
        description="What to do about it; empty if nothing.",
        examples=["vLLM answers and does not speculate; start vLLM with --speculative-config"],
    )
    since: datetime = Field(description="Of the condition.")
    scraped_at: datetime
    answered_at: datetime | None = Field(description="When its metrics could be read last.")
    scraped_by: str | None = Field(
        None,
        description="The sidecar whose turn it is or was last: host and process.",
        examples=["driftguard-0, process 7"],
    )

    @classmethod
    def of(cls, source: Source, scraped_by: str | None) -> SourceModel:
        return cls.model_validate(source).model_copy(update={"scraped_by": scraped_by})


class StatusAnswer(_Model):
    generated_at: datetime
    unfolded_records: int = Field(description="Stored records that the detector has not read yet.")
    false_alarm_days: float = Field(
        description="The setting: at most one false page in so many days, or in "
        "detection.false_alarm_minimum_requests of a stream if that takes longer."
    )
    fleet: FleetModel
    streams: list[StreamStatusModel] = Field(description="The worst in service first.")
    sources: list[SourceModel] = Field(description="Servers whose metrics are scraped or pushed, by name.")
    sources_elsewhere: list[str] = Field(
        description="Servers of this sidecar's settings that another sidecar on its database scrapes; this "
        "one takes over when that one ends."
    )


class FactModel(_Model):
    about: str = Field(description="probes, configuration, mix, queries, quality or target.")
    text: str
    numbers: dict[str, float | int | str | None]


class ExampleModel(_Model):
    """A captured request that is typical of what is new; there is one only while captures are kept."""

    record_id: UUID
    prompt_token_ids: list[int]


class DiagnosisModel(_Model):
    cause: Cause
    confidence: Confidence
    confidence_means: str = Field(examples=[CONFIDENCE_MEANS["high"]])
    summary: str = Field(examples=["the traffic moved (new topic)"])
    reason: str
    facts: list[FactModel] = Field(description="The evidence, each piece in words and numbers.")
    missing: list[str] = Field(description="Evidence that was not there, and how to have it the next time.")
    recommended_action: str
    retrain: bool = Field(description="The cause calls for a new draft.")
    awaits_probes: bool = Field(description="The canary probes have yet to be replayed since the change.")
    diagnosed_at: datetime
    examples: list[ExampleModel] = Field(description="Of one incident only; empty in a list of incidents.")

    @classmethod
    def of(cls, incident: Incident, examples: Sequence[ExampleModel] = ()) -> DiagnosisModel | None:
        if incident.diagnosis is None:
            return None
        known = {**incident.diagnosis, "examples": examples}
        means = CONFIDENCE_MEANS[known["confidence"]]
        return cls.model_validate({**known, "confidence_means": means})


class IncidentModel(_Model):
    id: UUID
    stream: StreamInfo
    state: Literal["open", "acknowledged", "mitigating", "resolved"]
    direction: Literal["down", "up"]
    severity: Literal["critical", "warning", "info"]
    summary: str
    opened_at: datetime
    since: datetime = Field(description="When acceptance changed, by the change point's record.")
    since_interval: tuple[datetime, datetime]
    change_point_record: int = Field(description="Running number of the first record after the change.")
    opened_record: int = Field(description="Running number of the record at which the detector was sure.")
    acceptance_before: float = Field(description="Of the changed segments.", examples=[0.74])
    acceptance_after: float = Field(examples=[0.58])
    tokens_per_second_before: float | None
    tokens_per_second_after: float | None
    cost_percent: float | None
    cost: Cost | None = Field(description="In tokens per second, and the best K, as the incident opened.")
    segments: list[dict[str, Any]] = Field(description="Changed segments, strongest evidence first.")
    evidence: dict[str, Any]
    diagnosis: DiagnosisModel | None = Field(description="Why; null for incidents of older versions.")
    resolved_at: datetime | None
    resolution: str | None
    level_accepted: bool = Field(description="It was resolved because the new level is normal.")

    @classmethod
    def of(cls, incident: Incident, stream: Stream) -> IncidentModel:
        return cls.model_validate(_facts(incident, stream))


class TransitionModel(_Model):
    from_state: str | None
    to_state: str = Field(description="As from_state where only the severity was raised.")
    severity: str | None = Field(description="From then on: of an opening, or raised; else null.")
    reason: str
    at: datetime


class NotificationModel(_Model):
    destination: str
    event: str
    severity: str
    created_at: datetime
    delivered_at: datetime | None
    attempts: int
    last_error: str | None

    @classmethod
    def of(cls, row: Notification) -> NotificationModel:
        kind, _, url = row.destination.partition(":")
        return cls(
            destination=f"{kind}:{_without_secrets(url)}",
            event=row.event,
            severity=row.severity,
            created_at=row.created_at,
            delivered_at=row.delivered_at,
            attempts=row.attempts,
            last_error=row.last_error.replace(url, _without_secrets(url)) if row.last_error else None,
        )


class IncidentDetail(IncidentModel):
    transitions: list[TransitionModel]
    notifications: list[NotificationModel]

    @classmethod
    def with_history(
        cls,
        incident: Incident,
        stream: Stream,
        transitions: list[IncidentTransition],
        notifications: list[Notification],
        examples: Sequence[ExampleModel] = (),
    ) -> IncidentDetail:
        return cls(
            **{**_facts(incident, stream), "diagnosis": DiagnosisModel.of(incident, examples)},
            transitions=[TransitionModel.model_validate(item) for item in transitions],
            notifications=[NotificationModel.of(item) for item in notifications],
        )


class IncidentPage(_Model):
    incidents: list[IncidentModel]
    next_cursor: str | None = Field(description="Pass as `cursor` for the next page; null at the end.")


def _facts(incident: Incident, stream: Stream) -> dict[str, Any]:
    names = ("id", "state", "direction", "severity", "opened_at", "acceptance_before", "acceptance_after")
    more = ("tokens_per_second_before", "tokens_per_second_after", "segments", "evidence", "resolved_at")
    return {
        **{name: getattr(incident, name) for name in (*names, *more, "resolution", "level_accepted")},
        "stream": StreamInfo.model_validate(stream),
        "summary": summary(incident, stream),
        "since": incident.change_point_at,
        "since_interval": (incident.interval_start_at, incident.interval_end_at),
        "change_point_record": incident.change_point_seq,
        "opened_record": incident.opened_seq,
        "cost_percent": cost_percent(incident),
        "cost": cost_of(incident),
        "diagnosis": DiagnosisModel.of(incident),
    }


def _without_secrets(url: str) -> str:
    """Scheme and host: the path of a webhook is often its password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.split('/', 1)[0].rsplit('@', 1)[-1]}"
