"""Shapes of the answers about the status."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Final, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from driftguard.adapters.condition import Condition
from driftguard.api.actions import ActionModel
from driftguard.cost import Cost, Speculation
from driftguard.detection import Acceptance, Fleet, SegmentSummary, StreamSummary
from driftguard.detection.findings import FactorName, SessionsGiven, Unit, duration, in_words
from driftguard.detection.state.columns import SECONDS_PER_DAY
from driftguard.incidents.aftermath import Aftermath
from driftguard.metrics.labels import StreamVerdict
from driftguard.probes.loop import ProbingState
from driftguard.records import Fidelity, UnrecordedReason
from driftguard.records.positions import Positions
from driftguard.settings import DetectionSettings, FalseAlarmScope
from driftguard.store.tables import RetrainRun, Source

_UNREAD: Final = "no sidecar reads it any more: it is in the settings of none that runs"


class FrozenModel(BaseModel):
    """Made from rows and dataclasses, by the names of their attributes."""

    model_config = ConfigDict(frozen=True, from_attributes=True)


POSITIONS: Final = (
    "Draft positions that the acceptance is of. first: the first draft token of each step, of requests that "
    "name no K and give counts per position; both: of the first token where that is so, else of all."
)


class Rate(FrozenModel):
    """Acceptance rate: sum of accepted / sum of drafted, with a 95% interval."""

    rate: float = Field(examples=[0.74])
    low: float = Field(examples=[0.72])
    high: float = Field(examples=[0.76])
    requests: int = Field(examples=[200])
    positions: Positions = Field(description=POSITIONS, examples=["all"])

    @classmethod
    def of(cls, acceptance: Acceptance | None) -> Rate | None:
        return cls.model_validate(acceptance) if acceptance else None


class NowAndBaseline(FrozenModel):
    now: Rate | None = Field(description="Newest requests of the watched segments.")
    baseline: Rate | None = Field(description="The baselines of the same segments, in the current mix.")


class TokensPerSecond(FrozenModel):
    """Per request while decoding: requests / sum of their times per output token."""

    now: float | None = Field(description="Last five minutes.", examples=[41.2])
    baseline: float | None = Field(
        description="Before the change while degraded, else the two hours before.", examples=[52.8]
    )
    cost_percent: float | None = Field(
        description="Percentage lost to the drift; null unless degraded.", examples=[22.0]
    )


class ExpectedDelayModel(FrozenModel):
    """From a drop of acceptance to its alarm; half of the alarms are raised sooner."""

    drop: float = Field(examples=[0.05])
    requests: float | None = Field(
        description="Of the segment, or windows of its counter; null: not detectable.", examples=[118.0]
    )
    seconds: float | None = Field(
        description="At the segment's current traffic; null if that is not known.", examples=[7_080.0]
    )
    unit: Literal["requests", "windows"]
    text: str = Field(examples=["a drop of 0.05: about 118 requests (2.0 h)"])


class FalseAlarms(FrozenModel):
    """The false-alarm guarantee: while nothing changes, the expected time to a false page is at least
    this."""

    requests: float = Field(description="A of the guarantee, or windows.", examples=[777_600.0])
    days: float | None = Field(
        description="The same at the current traffic; null until that is known.", examples=[90.0]
    )
    text: str = Field(examples=["at most one false page in 90 days (777,600 requests)"])

    @classmethod
    def of(cls, summary: StreamSummary, per_day: float | None, unit: Unit) -> FalseAlarms:
        requests = summary.false_alarm_every
        days = requests / per_day if per_day else None
        told = f"{requests:,.0f} {unit}"
        text = f"{duration(days * SECONDS_PER_DAY)} ({told})" if days is not None else told
        return cls(requests=requests, days=days, text=f"at most one false page in {text}")


class FollowsModel(FrozenModel):
    factor: FactorName
    by: float = Field(description="Half of what lies between where it is highest and where it is lowest.")
    text: str


class SegmentStatus(FrozenModel):
    segment: str = Field(examples=["german"])
    verdict: Literal["insufficient_data", "steady", "off_baseline", "degraded", "improved"] = Field(
        description="off_baseline: the interval of recent acceptance excludes the baseline; that is not "
        "enough for an alarm yet."
    )
    unit: Literal["requests", "windows"] = Field(
        description="What the detector counts: requests, or windows of a server's counters."
    )
    requests: int = Field(description="Or windows, that had draft tokens.")
    requests_needed: int = Field(
        description="At least this many more requests, or windows, until the segment is watched."
    )
    now: Rate | None
    baseline: Rate | None
    learning: str | None = Field(
        description="Why its current traffic is not watched yet; null once it is.",
        examples=["request, num_speculative_tokens 6: num_speculative_tokens changed from 4 to 6"],
    )
    baseline_reason: str | None = Field(
        description="Why the baseline in use was begun.", examples=["first baseline of the segment"]
    )
    expected_delays: list[ExpectedDelayModel] = Field(description="Empty until the segment is watched.")
    variance_inflation: float = Field(
        description="How many times more than independent ones these observations vary in the long run; a "
        "change takes about as many times longer to detect. 1: they are independent."
    )
    follows: list[FollowsModel] = Field(
        description="What its acceptance depends on as far as it was learned, and is therefore no change."
    )
    length_of_acceptance: bool = Field(
        description="Answer length is not used: it follows from acceptance (equally many steps each)."
    )
    alarm_waits: int | None = Field(
        description="There is evidence for an alarm, but the stream is young: after about so many more of "
        "its requests it is raised, if the evidence is still there. Null where none waits."
    )

    @classmethod
    def of(cls, item: SegmentSummary, slower: float) -> SegmentStatus:
        """`slower`: the traffic for which the expected delays were computed, divided by the current
        traffic."""
        delays = [
            replace(delay, seconds=None if delay.seconds is None else delay.seconds * slower)
            for delay in item.expected_delays
        ]
        return cls(
            segment=item.segment,
            verdict=item.verdict,
            unit=item.unit,
            requests=item.requests,
            requests_needed=item.requests_needed,
            now=Rate.of(item.recent),
            baseline=Rate.of(item.baseline),
            learning=in_words(item.learning),
            baseline_reason=in_words(item.baseline_reason),
            variance_inflation=item.variance_inflation,
            follows=[FollowsModel.model_validate(one) for one in item.follows],
            length_of_acceptance=item.length_of_acceptance,
            alarm_waits=item.alarm_waits,
            expected_delays=[ExpectedDelayModel.model_validate(delay) for delay in delays],
        )


class StreamInfo(FrozenModel):
    """A stream: (server, target, draft version, method)."""

    id: int
    server: str = Field(examples=["chat-eu-1"])
    target: str
    draft: str
    draft_version: str = Field(examples=["3f9c01d2ab44"])
    method: str = Field(examples=["draft_model"])


class LastRetrain(FrozenModel):
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


class LastIncident(FrozenModel):
    """The newest incident of the server and target that was resolved within a day."""

    id: UUID
    resolved_at: datetime
    aftermath: Aftermath


class StreamStatusModel(StreamInfo):
    cluster: str | None = Field(
        description="Of its server, by `clusters` in the settings; null where none names it."
    )
    verdict: StreamVerdict = Field(
        description="relearning: the detector's state was stored by another version of DriftGuard. "
        "cannot_be_judged: the detector fails at the stream's records, and the stream is not tried again "
        "automatically. speculation_loses: acceptance is fine or not known yet, but without speculation the "
        "stream would be faster at its current load. watching: its draft was just promoted and is compared "
        "with the one before; it has no baseline yet."
    )
    acceptance_verdict: StreamVerdict = Field(
        description="Without regard to whether speculation pays, and to a silence of the source."
    )
    text: str = Field(
        description="The verdict in one sentence.", examples=["Steady: acceptance 0.74, baseline 0.75."]
    )
    since: datetime | None
    in_service: bool
    draft_in_service: str
    acceptance: NowAndBaseline
    acceptance_length: float | None = Field(
        description="Emitted tokens per verification step in the last five minutes: 1 where no draft token "
        "is accepted, at most K + 1. null where there was no step.",
        examples=[3.4],
    )
    acceptance_per_position: list[float | None] = Field(
        description="In the last five minutes, at the first 16 positions of a draft: accepted / drafted "
        "there, or accepted / steps where the records do not tell how many were drafted there. Empty where "
        "they tell no positions.",
        examples=[[0.86, 0.75, 0.64, 0.55]],
    )
    tokens_per_second: TokensPerSecond
    sample_size: int = Field(description="Requests, or windows of a counter, folded by the detector.")
    requests_missing: int = Field(
        description="At least this many more requests, or windows, until the first segment is watched."
    )
    incident_id: UUID | None
    last_retrain: LastRetrain | None
    segments: list[SegmentStatus]
    cost: Cost | None = Field(description="Of speculation, and the best K; measured every few minutes.")
    cost_measured_at: datetime | None
    speculation: Speculation | None = Field(
        description="Whether speculation pays at the current load: times the tokens per second without it, "
        "with a 95% interval; or what is missing to know it. null where the stream is not in service, or has "
        "no speculation."
    )
    last_incident: LastIncident | None = Field(
        description="Resolved within a day, of the same server and target; null where there is none."
    )
    actions: list[ActionModel] = Field(
        description="What could be done now, in a fixed order, with what each gains; one is the best. "
        "Empty where the stream does not draft now."
    )
    first_seen_at: datetime
    last_seen_at: datetime
    records_in_other: int = Field(description="Records whose segment was beyond the limit of 64.")
    sessions: SessionsGiven = Field(
        description="Whether requests name their session. If not, only neighbouring requests are treated as "
        "correlated."
    )
    windows_after_gap: int = Field(
        description="Windows after a restart or a missed scrape: counted, but never used as evidence."
    )
    requests_per_day: float | None = Field(
        description="Of the last day; of the first reference period until it is known for an hour, and "
        "where the last day had none. null before that. Of a scraped server, windows."
    )
    false_alarms: FalseAlarms | None = Field(description="null before the first record is read.")


class FleetModel(FrozenModel):
    """How many streams are watched, and whether the false-alarm rate is per stream or for all together."""

    streams: int = Field(description="In service, with speculation.")
    false_alarm_scope: FalseAlarmScope = Field(
        description="The scope of the false-alarm rate: each stream, or all together."
    )
    false_alarm_factor: float = Field(
        description="Factor on A for the next stream with an alarm: N / k with the scope fleet."
    )
    text: str

    @classmethod
    def of(cls, fleet: Fleet, settings: DetectionSettings) -> FleetModel:
        together = settings.false_alarm_scope == "fleet"
        whose = "over all of them" if together else "of each"
        text = f"{fleet.streams} stream{'' if fleet.streams == 1 else 's'} in service"
        if fleet.streams:
            text += (
                f": while nothing changes, the first false page {whose} is to be expected after "
                f"{settings.false_alarm_days:g} days or more"
            )
        return cls(
            streams=fleet.streams,
            false_alarm_scope=settings.false_alarm_scope,
            false_alarm_factor=fleet.factor() if together and fleet.streams else 1.0,
            text=text,
        )


class SourceModel(FrozenModel):
    """A server whose metrics are scraped or pushed (OTLP), after the newest scrape or export."""

    server: str = Field(examples=["chat-eu-1"])
    kind: str = Field(description="The serving engine; unknown until it answered.", examples=["vllm"])
    url: str = Field(description="OTLP: its metrics are pushed.", examples=["http://chat-eu-1:8000/metrics"])
    version: str | None = Field(
        None, description="Of the engine, as it told it last; null: it does not.", examples=["0.32.0"]
    )
    fidelity: Fidelity | None = Field(
        description="The precision of its counts: counter, or gauge (in part derived); null: not known.",
        examples=["counter"],
    )
    condition: Condition = Field(examples=["reporting"])
    detail: str = Field(
        description="What to do about it; empty if nothing.",
        examples=["vLLM answers, but does not speculate; start vLLM with --speculative-config"],
    )
    since: datetime = Field(description="Of the condition.")
    scraped_at: datetime
    answered_at: datetime | None = Field(description="When its metrics were last read successfully.")
    announced_draft_version: str | None = Field(
        None,
        description="The draft that it is to serve after its next restart, as announced by a promotion or by "
        "POST /api/v1/drafts/announce; null: none is awaited.",
    )
    scraped_by: str | None = Field(
        None,
        description="The sidecar that holds, or last held, its scraping lease: host and process.",
        examples=["driftguard-0, process 7"],
    )

    @classmethod
    def of(
        cls,
        source: Source,
        scraped_by: str | None,
        version: str | None,
        announced: str | None,
        *,
        is_unread: bool,
    ) -> SourceModel:
        more: dict[str, object] = {
            "scraped_by": scraped_by,
            "version": version,
            "announced_draft_version": announced,
        }
        if is_unread:
            more |= {"condition": "stale", "detail": _UNREAD, "since": source.scraped_at}
        return cls.model_validate(source).model_copy(update=more)


class ProbedModel(FrozenModel):
    """Canary probes that this sidecar replays by itself on one server."""

    server: str = Field(examples=["chat-eu-1"])
    url: str = Field(examples=["http://chat-eu-1:8000"])
    interval_seconds: float = Field(description="Between two replays, while it has traffic.")
    state: ProbingState = Field(
        description="waiting: not asked yet. refused: the last time, for the reason in detail; it is tried "
        "again after a minute, and after twice as long each further time, up to the interval."
    )
    detail: str = Field(
        description="What the probes cost, or what is missing.",
        examples=["32 requests every 60 min, at most 2,048 tokens of answers"],
    )
    replayed_at: datetime | None = Field(description="By this sidecar since it started.")


class UnrecordedModel(FrozenModel):
    """Answered requests of a server in the last 24 hours, by what became of their records."""

    server: str = Field(examples=["chat-eu-1"])
    recorded: int = Field(description="Requests that have a record of their own.", examples=[8_312])
    unrecorded: int = Field(
        description="Answered and not recorded, as their senders report it; without canary probes, failed "
        "requests and those that generate nothing.",
        examples=[3_735],
    )
    share: float = Field(description="unrecorded / (recorded + unrecorded)", examples=[0.31])
    reasons: dict[UnrecordedReason, int] = Field(
        description="Of the unrecorded ones, the most frequent first.", examples=[{"stop_string": 3_735}]
    )
    text: str = Field(
        description="What that means and what to do; empty below 5%, and below 100 requests. It ends the "
        "sentence of the server's streams that are made of requests."
    )


class StatusAnswer(FrozenModel):
    generated_at: datetime
    unfolded_records: int = Field(description="Stored records that the detector has not folded yet.")
    false_alarm_days: float = Field(
        description="The setting: at most one false page in this many days, or in "
        "detection.false_alarm_minimum_requests of a stream if that takes longer."
    )
    fleet: FleetModel
    streams: list[StreamStatusModel] = Field(description="The worst in service first, `limit` at most.")
    streams_left_out: int = Field(
        description="Number of streams beyond `limit`; GET /api/v1/streams has all, paginated.", examples=[0]
    )
    sources: list[SourceModel] = Field(description="Servers whose metrics are scraped or pushed, by name.")
    sources_elsewhere: list[str] = Field(
        description="Servers of this sidecar's settings that another sidecar on its database scrapes; this "
        "one takes over when that one ends."
    )
    unrecorded: list[UnrecordedModel] = Field(
        description="Servers with requests that were answered and not recorded, the largest share first, "
        "`limit` at most. Not those known by their counters alone, which count all requests."
    )
    probes: list[ProbedModel] = Field(
        description="Servers whose canary probes this sidecar replays by itself; empty where probes.enabled "
        "is off, and where no address is known."
    )
