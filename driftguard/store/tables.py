"""Every table, as SQLAlchemy 2.1 mapped classes. Times are UTC."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    BigInteger,
    CheckConstraint,
    DateTime,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    Sequence,
    Text,
    UniqueConstraint,
    Uuid,
    false,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from driftguard.records import UnrecordedReason
from driftguard.records.documents.cost import Cost
from driftguard.records.documents.goodput import GoodputWatch
from driftguard.records.documents.incident import ChangedSegment, IncidentDiagnosis, IncidentEvidence
from driftguard.records.documents.retraining_run import RunNumbers, TrainingCurve
from driftguard.records.documents.serving_scores import ServingScores
from driftguard.store.column_types import Document, FiniteDocument, FiniteDouble, name_columns

ACCEPTANCE_BUCKETS = 20  # histogram of per-request acceptance rate in rollups, width 1/20


class Base(DeclarativeBase):
    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy reads this name)
        datetime: DateTime(timezone=True),
        str: Text,
        int: BigInteger,
        float: FiniteDouble,
        UUID: Uuid,
        bytes: LargeBinary,
        dict[str, Any]: FiniteDocument,
        list[int]: ARRAY(BigInteger),
    }


RECORDS_SEQ = Sequence("records_seq", metadata=Base.metadata)  # drawn under the ingest lock only
ABOVE_EVERY_SEQ = 2**62


class Stream(Base):
    """(server, target, draft version, method): what one detector watches."""

    __tablename__ = "streams"
    __table_args__ = (
        UniqueConstraint("server", "target", "draft_version", "method", name="uq_streams_key"),
        CheckConstraint(
            "begun_anew_because IN ('other_version', 'damaged')", name="ck_streams_begun_anew_because"
        ),
    )

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    server: Mapped[str]
    target: Mapped[str]
    draft: Mapped[str]
    draft_version: Mapped[str]
    method: Mapped[str]
    first_seen_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]
    # None before the first record that is no canary probe. By our clock, and by the source's.
    traffic_arrived_at: Mapped[datetime | None]
    traffic_ended_at: Mapped[datetime | None]
    # Its stored detector state could not be read, and no baseline has been learned since; None else.
    begun_anew_at: Mapped[datetime | None]
    begun_anew_because: Mapped[str | None]
    records_in_other: Mapped[int] = mapped_column(default=0, server_default="0")


class Segment(Base):
    """A bounded label of the traffic inside a stream; at most 64, the rest are stored as 'other'."""

    __tablename__ = "segments"

    stream_id: Mapped[int] = mapped_column(ForeignKey("streams.id", ondelete="CASCADE"), primary_key=True)
    segment: Mapped[str] = mapped_column(primary_key=True)
    first_seen_at: Mapped[datetime]


class Record(Base):
    """One AcceptanceRecord. Partitioned by the day of ended_at; `seq` rises in commit order."""

    __tablename__ = "records"
    __table_args__ = (
        CheckConstraint("accepted <= drafted", name="ck_records_accepted"),
        CheckConstraint("emitted <= accepted + steps", name="ck_records_emitted"),
        Index("ix_records_seq", "seq"),
        Index("ix_records_stream_ended_at", "stream_id", "ended_at"),
        Index("ix_records_stream_seq", "stream_id", "seq"),
        Index("ix_records_probes", "stream_id", "ended_at", postgresql_where="kind = 'probe'"),
        {"postgresql_partition_by": "RANGE (ended_at)"},
    )

    record_id: Mapped[UUID] = mapped_column(primary_key=True)
    ended_at: Mapped[datetime] = mapped_column(primary_key=True)
    seq: Mapped[int]
    stream_id: Mapped[int]
    kind: Mapped[str]
    started_at: Mapped[datetime]
    segment: Mapped[str]
    session: Mapped[str | None]
    steps: Mapped[int]
    drafted: Mapped[int]
    accepted: Mapped[int]
    emitted: Mapped[int]
    drafted_per_position: Mapped[list[int] | None]
    accepted_per_position: Mapped[list[int] | None]
    num_speculative_tokens: Mapped[int | None] = mapped_column(Integer)
    acceptance_rule: Mapped[str]
    verification: Mapped[str]
    temperature: Mapped[float | None]
    prompt_tokens: Mapped[int | None]
    cached_tokens: Mapped[int | None]  # of the prompt, found in the server's prefix cache
    output_tokens: Mapped[int | None]
    time_to_first_token_seconds: Mapped[float | None]
    time_per_output_token_seconds: Mapped[float | None]
    concurrency: Mapped[int | None]
    waiting_requests: Mapped[int | None]  # in the server's queue, beside those that run
    started_requests: Mapped[int | None]  # that gave their first token, in a window
    fidelity: Mapped[str]


class RollupTier(Base):
    """Sums over the records of one segment that ended within one minute, hour or day of UTC.

    `minute` is the first minute of it. acceptance_buckets counts requests by accepted/drafted in steps of
    1/20. The ingest adds each record to all three tiers, so that none has to be made of another. The counts
    per position are of the first POSITIONS_SUMMED positions and of the records that tell how many were
    accepted there; a record that does not tell how many were drafted there counts its steps. Null: no record
    told positions.
    """

    __abstract__ = True

    minute: Mapped[datetime] = mapped_column(primary_key=True)
    stream_id: Mapped[int] = mapped_column(primary_key=True)
    segment: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    records: Mapped[int]
    steps: Mapped[int]
    drafted: Mapped[int]
    accepted: Mapped[int]
    emitted: Mapped[int]
    output_tokens: Mapped[int]
    acceptance_buckets: Mapped[list[int]]
    drafted_per_position: Mapped[list[int] | None]
    accepted_per_position: Mapped[list[int] | None]
    time_per_output_token_sum: Mapped[float]
    time_per_output_token_count: Mapped[int]
    time_to_first_token_sum: Mapped[float]
    time_to_first_token_count: Mapped[int]


def _traffic_by_time(index: str) -> tuple[Any, ...]:
    traffic = Index(index, "stream_id", "minute", postgresql_where="kind <> 'probe'")
    return (traffic, {"postgresql_partition_by": "RANGE (minute)"})


class Rollup(RollupTier):
    """Of a minute. Partitioned by day."""

    __tablename__ = "rollups_1m"
    __table_args__ = _traffic_by_time("ix_rollups_traffic")


class HourlyRollup(RollupTier):
    """Of an hour. Partitioned by month."""

    __tablename__ = "rollups_1h"
    __table_args__ = _traffic_by_time("ix_rollups_1h_traffic")


class DailyRollup(RollupTier):
    """Of a day. Partitioned by year."""

    __tablename__ = "rollups_1d"
    __table_args__ = _traffic_by_time("ix_rollups_1d_traffic")


class FoldPosition(Base):
    """The seq up to which a named reader has folded; written in one transaction with what it derived. `folds`
    counts these transactions: another number than the one remembered means that another process folded.
    `folded_by` is for economy: that no two fold at once is up to the lock."""

    __tablename__ = "fold_positions"

    reader: Mapped[str] = mapped_column(primary_key=True)
    seq: Mapped[int]
    folds: Mapped[int] = mapped_column(default=0, server_default="0")
    folded_by: Mapped[UUID | None]  # the process whose fold was the last; null once it ended


class DetectorState(Base):
    __tablename__ = "detector_states"

    stream_id: Mapped[int] = mapped_column(ForeignKey("streams.id", ondelete="CASCADE"), primary_key=True)
    state: Mapped[bytes]
    history_rows: Mapped[int | None]  # null: stored before 0005, the whole history is in `state`
    summary: Mapped[dict[str, Any]]  # what the status shows, so that reading it needs no unpacking
    updated_at: Mapped[datetime]
    fold: Mapped[int] = mapped_column(default=0, server_default="0")  # number of the fold that wrote `state`


class DetectorHistory(Base):
    """The history of a state in pieces that never change, see driftguard.detection.state.codec."""

    __tablename__ = "detector_histories"

    stream_id: Mapped[int] = mapped_column(
        ForeignKey("detector_states.stream_id", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(primary_key=True)
    piece: Mapped[bytes]


class HeldStream(Base):
    """A stream that raised when it was folded: the fold went on without it, and it is tried again. Its
    detector state is that of the records up to `after_seq`."""

    __tablename__ = "held_streams"

    stream_id: Mapped[int] = mapped_column(ForeignKey("streams.id", ondelete="CASCADE"), primary_key=True)
    after_seq: Mapped[int]
    records_behind: Mapped[int]  # those that the fold read past
    failures: Mapped[int]  # one after the other
    reason: Mapped[str]  # of the last one
    version: Mapped[str]  # of DriftGuard, that failed last
    since: Mapped[datetime]
    next_try_at: Mapped[datetime | None]  # None: when another version starts, or somebody asks for it
    set_aside_at: Mapped[datetime | None]  # failed too often to be tried again by itself


class StreamCost(Base):
    """What speculation costs a stream, see driftguard.cost; `cost` is None where its records do not tell."""

    __tablename__ = "stream_costs"

    stream_id: Mapped[int] = mapped_column(ForeignKey("streams.id", ondelete="CASCADE"), primary_key=True)
    measured_at: Mapped[datetime]
    cost: Mapped[Cost | None] = mapped_column(Document(Cost, none_as_null=True))


class GoodputWatchRow(Base):
    """The watch over a stream's goodput, see driftguard.cost.goodput. `looked_at`: null before it
    looked first."""

    __tablename__ = "goodput_watches"

    stream_id: Mapped[int] = mapped_column(ForeignKey("streams.id", ondelete="CASCADE"), primary_key=True)
    watch: Mapped[GoodputWatch] = mapped_column(Document(GoodputWatch))
    looked_at: Mapped[datetime | None]


class Source(Base):
    """A server whose metrics are scraped or pushed, as the newest ones show it; see driftguard.sources."""

    __tablename__ = "sources"

    server: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    url: Mapped[str]
    fidelity: Mapped[str | None]
    condition: Mapped[str]
    detail: Mapped[str]
    since: Mapped[datetime]
    scraped_at: Mapped[datetime]
    answered_at: Mapped[datetime | None]
    interval_seconds: Mapped[float]


class ServerStart(Base):
    """When a server's process started, by its own metrics: gives the age of the server at a record."""

    __tablename__ = "server_starts"

    server: Mapped[str] = mapped_column(primary_key=True)
    started_at: Mapped[datetime] = mapped_column(primary_key=True)


class ServerVersion(Base):
    """Since when a server is known to run an engine in a version, by its own answer. `noticed_seq`: of the
    last record that had arrived then; None before migration 0030."""

    __tablename__ = "server_versions"

    server: Mapped[str] = mapped_column(primary_key=True)
    noticed_at: Mapped[datetime] = mapped_column(primary_key=True)
    kind: Mapped[str]  # of the adapter
    version: Mapped[str]
    noticed_seq: Mapped[int | None]


class AnnouncedDraft(Base):
    """The draft version of a scraped server that was announced: `serving`, since the counts from
    `serving_since` on, while the settings say `instead_of`; `started_with`, which a restart brings back; and
    `version`, which it is to serve next."""

    __tablename__ = "announced_drafts"

    server: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[str | None]
    effective: Mapped[str]  # see driftguard.store.announced_drafts
    announced_at: Mapped[datetime]
    started_at: Mapped[datetime | None]  # of the server's process when it was announced, if known
    serving: Mapped[str | None]
    serving_since: Mapped[datetime | None]
    instead_of: Mapped[str | None]
    started_with: Mapped[str | None]


class ScrapeLease(Base):
    """Which sidecar took a server to scrape it last; whether it still does, its lock tells."""

    __tablename__ = "scraping_turns"

    server: Mapped[str] = mapped_column(primary_key=True)
    turn: Mapped[UUID]  # a new one whenever another sidecar may have scraped the server in between
    sidecar: Mapped[str]
    taken_at: Mapped[datetime]


class ConfiguredEngine(Base):
    """A server that a sidecar on this database has among the engines in its settings."""

    __tablename__ = "configured_engines"

    server: Mapped[str] = mapped_column(primary_key=True)
    told_at: Mapped[datetime]  # last, by the database's clock


class Incident(Base):
    __tablename__ = "incidents"
    __table_args__ = (
        Index("ix_incidents_opened_at", "opened_at"),
        Index("ix_incidents_awaiting", "opened_at", postgresql_where="awaits_examination"),
        Index(
            "uq_incidents_one_open_per_direction",
            "stream_id",
            "direction",
            unique=True,
            postgresql_where="state <> 'resolved'",
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    stream_id: Mapped[int] = mapped_column(ForeignKey("streams.id", ondelete="CASCADE"))
    direction: Mapped[str]  # down | up, of acceptance; slower: of goodput
    state: Mapped[str]  # see driftguard.incident_lifecycle
    severity: Mapped[str]  # critical | warning | info
    opened_at: Mapped[datetime]
    opened_seq: Mapped[int]
    change_point_seq: Mapped[int]
    change_point_at: Mapped[datetime]
    interval_start_at: Mapped[datetime]
    interval_end_at: Mapped[datetime]
    acceptance_before: Mapped[float]
    acceptance_after: Mapped[float]
    tokens_per_second_before: Mapped[float | None]  # per request: 1 / time per output token
    tokens_per_second_after: Mapped[float | None]
    segments: Mapped[tuple[ChangedSegment, ...]] = mapped_column(Document(tuple[ChangedSegment, ...]))
    evidence: Mapped[IncidentEvidence] = mapped_column(Document(IncidentEvidence))
    # None until it has been examined.
    diagnosis: Mapped[IncidentDiagnosis | None] = mapped_column(Document(IncidentDiagnosis))
    resolved_at: Mapped[datetime | None]
    resolution: Mapped[str | None]
    # An operator accepted the new level: the fold has its segments' baselines learned anew.
    level_accepted: Mapped[bool] = mapped_column(default=False, server_default=false())
    # Nobody is told yet, see driftguard.incidents.examination: until then it is "info", whatever it will be.
    awaits_examination: Mapped[bool] = mapped_column(default=False, server_default=false())

    @property
    def is_left_to_retraining(self) -> bool:
        """A retraining is at it: its end, or that of its watch, decides what becomes of it. Also where a
        person has acknowledged it meanwhile."""
        if self.state == "resolved":
            return False
        under_way = self.evidence.is_retrained or self.evidence.mitigation is not None
        return under_way or self.state in ("mitigating", "recovered_in_part")


class AwaitedComparison(Base):
    """A stream with a baseline that is still to be compared with the target before; gone once it is."""

    __tablename__ = "awaited_comparisons"

    stream_id: Mapped[int] = mapped_column(ForeignKey("streams.id", ondelete="CASCADE"), primary_key=True)
    ready_seq: Mapped[int]  # of the record that completed the newest baseline
    reference_since: Mapped[datetime]  # end of that baseline's first request
    # Compared within the stream; only with the one before, that is served beside it, once that is silent.
    is_beside: Mapped[bool] = mapped_column(default=False, server_default=false())


class IncidentTransition(Base):
    __tablename__ = "incident_transitions"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    incident_id: Mapped[UUID] = mapped_column(ForeignKey("incidents.id", ondelete="CASCADE"), index=True)
    from_state: Mapped[str | None]
    to_state: Mapped[str]  # as from_state where only the severity was raised
    severity: Mapped[str | None]  # from then on: of an opening, or raised; else null
    reason: Mapped[str]
    at: Mapped[datetime]


class Notification(Base):
    """One message to one destination about one severity of an incident; unique: nothing pages twice."""

    __tablename__ = "notifications"
    __table_args__ = (
        UniqueConstraint("incident_id", "destination", "event", "severity", name="uq_notifications_once"),
        Index(
            "ix_notifications_undelivered",
            "destination",
            "id",
            postgresql_where="delivered_at IS NULL",
        ),
    )

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    incident_id: Mapped[UUID] = mapped_column(ForeignKey("incidents.id", ondelete="CASCADE"))
    destination: Mapped[str]  # alerting.destination.identity: names the place without its secrets
    event: Mapped[str]  # firing | resolved
    severity: Mapped[str]  # of the incident then: one that became graver is told again
    created_at: Mapped[datetime]
    delivered_at: Mapped[datetime | None]
    attempts: Mapped[int] = mapped_column(default=0, server_default="0")
    last_error: Mapped[str | None]
    leased_until: Mapped[datetime | None]  # until then one sidecar alone sends it
    next_attempt_at: Mapped[datetime | None]  # not before; None: at once


class Capture(Base):
    """Token ids of one sampled request, kept for retraining within its retention time."""

    __tablename__ = "captures"
    __table_args__ = (
        Index("ix_captures_pick", "server", "target", "segment", "captured_at"),
        Index("ix_captures_captured_at", "captured_at"),
    )

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    record_id: Mapped[UUID] = mapped_column(unique=True)
    server: Mapped[str]
    target: Mapped[str]
    draft_version: Mapped[str]
    segment: Mapped[str]
    captured_at: Mapped[datetime]
    prompt_token_ids: Mapped[list[int]] = mapped_column(ARRAY(Integer))
    output_token_ids: Mapped[list[int]] = mapped_column(ARRAY(Integer))


class UnrecordedRow(Base):
    """Requests that were answered and not recorded; see driftguard.records.unrecorded."""

    __tablename__ = "unrecorded_requests"

    hour: Mapped[datetime] = mapped_column(primary_key=True)
    server: Mapped[str] = mapped_column(primary_key=True)
    reason: Mapped[UnrecordedReason] = mapped_column(Text, primary_key=True)
    reporter: Mapped[UUID] = mapped_column(primary_key=True)
    requests: Mapped[int]


class ServingScoresRow(Base):
    """The newest scoring of an incident's captured requests, see driftguard.retraining.serving_scores."""

    __tablename__ = "serving_scores"
    __table_args__ = (Index("ix_serving_scores_running", "started_at", postgresql_where="state = 'scoring'"),)

    incident_id: Mapped[UUID] = mapped_column(
        ForeignKey("incidents.id", ondelete="CASCADE"), primary_key=True
    )
    captures: Mapped[int]  # what it was made for, as in SeenEvidence
    state: Mapped[str]  # scoring | scored | missing
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    missing: Mapped[str | None]  # the code of why there are none; see MissingScores
    # Of this scoring or, where it made none, of the one before.
    scores: Mapped[ServingScores | None] = mapped_column(Document(ServingScores, none_as_null=True))


class Draft(Base):
    """A draft that DriftGuard knows: one seen in records, or a candidate that it trained."""

    __tablename__ = "drafts"
    __table_args__ = (UniqueConstraint("server", "target", "version", name="uq_drafts_version"),)

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    server: Mapped[str]
    target: Mapped[str]
    version: Mapped[str]
    name: Mapped[str]
    method: Mapped[str]
    directory: Mapped[str | None]
    parent_version: Mapped[str | None]
    state: Mapped[str]  # candidate | rejected | in_service | retired | rolled_back | lost
    created_at: Mapped[datetime]
    promoted_at: Mapped[datetime | None]
    retired_at: Mapped[datetime | None]
    retrain_run_id: Mapped[UUID | None] = mapped_column(ForeignKey("retrain_runs.id", ondelete="SET NULL"))


class RetrainRun(Base):
    __tablename__ = "retrain_runs"
    _place = ("server", "target", "started_at")
    _ended = "'promoted', 'rejected', 'nothing_to_do', 'failed', 'rolled_back'"
    __table_args__ = (
        Index("ix_retrain_runs_started_at", "started_at"),
        Index("ix_retrain_runs_place", *_place),
        Index("ix_retrain_runs_unended", "server", "target", postgresql_where=f"state NOT IN ({_ended})"),
        Index("ix_retrain_runs_judged", *_place, postgresql_where="numbers ? 'gate'"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    server: Mapped[str]
    target: Mapped[str]
    incident_id: Mapped[UUID | None] = mapped_column(ForeignKey("incidents.id", ondelete="SET NULL"))
    trigger: Mapped[str]  # incident | nightly | manual
    # collecting | training | evaluating | promoting | rolling_out | watching | rolling_back (running)
    # promoted | rejected | nothing_to_do | failed | rolled_back (ended)
    state: Mapped[str]
    reason: Mapped[str | None]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    parent_version: Mapped[str | None]
    candidate_version: Mapped[str | None]
    progress: Mapped[dict[str, Any] | None]  # {"step", "steps", "loss", "acceptance"} while training
    numbers: Mapped[RunNumbers | None] = mapped_column(Document(RunNumbers))
    # Some 50 kB, which lists of runs do not need: retrain_runs.curve_of reads it.
    curve: Mapped[TrainingCurve | None] = mapped_column(Document(TrainingCurve), deferred=True)


class ProbePrompt(Base):
    """One canary prompt of a server, in a fixed order. `key` is a digest of `body`: the same prompt again
    is the same probe."""

    __tablename__ = "probe_prompts"

    server: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    position: Mapped[int]
    segment: Mapped[str]
    body: Mapped[dict[str, Any]]  # {"prompt": text or token ids} or {"messages": [...]}
    created_at: Mapped[datetime]


class ApiKey(Base):
    """A key is shown once and stored as a SHA-256 digest."""

    __tablename__ = "api_keys"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    digest: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]


for _table in Base.metadata.tables.values():
    name_columns(_table)
