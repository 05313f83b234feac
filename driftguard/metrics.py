"""Every Prometheus metric of the sidecar. Labels are bounded: never a request, a user or a session.

One `Metrics` per process (and per test), handed to whoever counts. Ratios are left to the reader: counters
are exported, `rate(accepted) / rate(drafted)` is a ratio of sums.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Final, Literal, Protocol, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from driftguard.adapters.condition import CONDITIONS, DOWN, Condition
from driftguard.records import StreamKey

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
StreamVerdict = Literal[
    "insufficient_data",
    "relearning",
    "steady",
    "degraded",
    "improved",
    "drafting_stopped",
    "cannot_be_judged",
    "stale",
    "replaced",
]
VERDICTS: Final[tuple[StreamVerdict, ...]] = get_args(StreamVerdict)

CHORES: Final = ("diagnose", "measure_costs", "defer_retraining", "look_at_exports", "maintain")
LOOPS: Final = ("scraping", "probes", "alerts", "jobs", "look_around", "examination")
SEVERITIES: Final = ("critical", "warning", "info")
DIRECTIONS: Final = ("down", "up")
RUN_OUTCOMES: Final = ("promoted", "nothing_to_do", "rejected", "failed", "rolled_back")

PLACE = ("server", "target")
STREAM = (*PLACE, "draft_version", "method")
INCIDENT = (*STREAM, "direction", "severity")
TRAFFIC = (*STREAM, "segment", "kind")
SOURCE = ("source", "kind")
OTHER: Final = "OTHER"  # for each name, where streams beyond metrics.max_streams are counted together

disable_created_metrics()  # type: ignore[no-untyped-call]


class Counts(Protocol):
    """Counts of records of one stream, segment and kind."""

    records: int
    steps: int
    drafted: int
    accepted: int
    emitted: int


class Metrics:
    """The metrics and their registry. Attributes are the metrics; methods set what belongs together."""

    def __init__(self, max_streams: int = 1_000) -> None:
        self.registry = CollectorRegistry()
        self.max_streams = max_streams
        self._counted: set[tuple[str, ...]] = set()  # streams with counters of their own
        self._counted_together: set[tuple[str, ...]] = set()
        self._ended_runs: dict[tuple[str, str, str], int] = {}
        self._shown: dict[Gauge, dict[tuple[str, ...], float]] = {}
        self._kinds: dict[str, str] = {}
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._declare_traffic()
        self._declare_ingest()
        self._declare_detection()
        self._declare_incidents()
        self._declare_chores()
        self._declare_notifications()
        self._declare_retraining()
        self._declare_sources()
        self._declare_streams()
        self._declare_drafts()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _declare_traffic(self) -> None:
        self.records = self._counter(
            "driftguard_records", "Acceptance records folded by the detector.", *TRAFFIC
        )
        self.steps = self._counter("driftguard_steps", "Verification steps in the folded records.", *TRAFFIC)
        self.draft_tokens = self._counter(
            "driftguard_draft_tokens", "Draft tokens offered to the target.", *TRAFFIC
        )
        self.accepted_tokens = self._counter(
            "driftguard_accepted_tokens", "Draft tokens that the target accepted.", *TRAFFIC
        )
        self.emitted_tokens = self._counter(
            "driftguard_emitted_tokens", "Tokens emitted: accepted plus bonus tokens.", *TRAFFIC
        )

    def _declare_ingest(self) -> None:
        self.ingest_records = self._counter(
            "driftguard_ingest_records",
            "Records that arrived over HTTP, by what became of them.",
            "outcome",  # accepted | duplicate | refused | rejected_queue_full
        )
        self.otlp_ignored_spans = self._counter(
            "driftguard_otlp_ignored_spans",
            "Spans that arrived over OTLP without counts of speculative decoding.",
        )
        self.otlp_ignored_points = self._counter(
            "driftguard_otlp_ignored_points", "Data points that arrived over OTLP and are of no use here."
        )
        self.otlp_rejected_points = self._counter(
            "driftguard_otlp_rejected_points",
            "Data points that arrived over OTLP and were rejected; the answer told why.",
        )
        self.stream_limit_refused_records = self._counter(
            "driftguard_stream_limit_refused_records",
            "Records refused, whichever way they came: their stream would pass ingest.max_streams.",
        )
        self.ingest_queued_records = self._gauge(
            "driftguard_ingest_queued_records", "Records waiting for the database."
        )
        self.ingest_oldest_unacknowledged = self._gauge(
            "driftguard_ingest_oldest_unacknowledged_seconds",
            "How long the batch has waited for its commit that has waited longest; 0 where none waits.",
        )
        self.ingest_commit_seconds = Histogram(
            "driftguard_ingest_commit_seconds",
            "Time from arrival of a batch to its commit.",
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
            registry=self.registry,
        )
        self.captures = self._counter(
            "driftguard_captures", "Captured requests by what became of them.", "outcome"
        )
        self.database_up = self._gauge("driftguard_database_up", "1 if the last use of the database worked.")
        self.embedded_restarts = self._counter(
            "driftguard_embedded_database_restarts",
            "How often the embedded PostgreSQL had gone and was started again.",
        )
        self.database_timeouts = self._counter(
            "driftguard_database_timeouts",
            "Units of work that took the database longer than their kind waits, and were rolled back.",
            "work",
            "reason",  # statement | lock | idle | silence
        )

    def _declare_detection(self) -> None:
        self.fold_lag_records = self._gauge(
            "driftguard_fold_lag_records", "Stored records not yet folded; NaN while that is not known."
        )
        self.fold_failures = self._counter(
            "driftguard_fold_failures", "Batches whose fold failed and was rolled back."
        )
        self.stream_failures = self._counter(
            "driftguard_stream_failures",
            "Failures of one stream's part of a batch, which went on without it.",
        )
        self.streams_set_aside = self._gauge(
            "driftguard_streams_set_aside",
            "Streams in service whose fold failed so often that it is not tried again by itself.",
        )
        self.stream_set_aside_since = self._gauge(
            "driftguard_stream_set_aside_since_timestamp_seconds",
            "From when on no drift of a stream that is set aside is found; of 100 streams at the most, the "
            "longest first.",
            *STREAM,
        )
        self.detector_states_lost = self._counter(
            "driftguard_detector_states_lost",
            "Stored detector states that were damaged, so that their streams began anew.",
        )
        self.detector_states_of_other_version = self._counter(
            "driftguard_detector_states_of_other_version",
            "Stored detector states of another version of DriftGuard, so that their streams began anew.",
        )
        self.detector_last_round = self._gauge(
            "driftguard_detector_last_round_timestamp_seconds",
            "When the detector last made a round: it folded what was there, or there was nothing, or another "
            "sidecar folds.",
        )
        self.gauges_last_refresh = self._gauge(
            "driftguard_gauges_last_refresh_timestamp_seconds",
            "When every gauge of a stream, an incident or a retraining was last set.",
        )
        self.stream_last_arrival = self._gauge(
            "driftguard_stream_last_arrival_timestamp_seconds",
            "When the stream's newest record arrived that was no canary probe.",
            *STREAM,
        )
        self.speculation_speedup = self._gauge(
            "driftguard_speculation_speedup_ratio",
            "Tokens per second with the stream's present speculation, as a multiple of those without; with a "
            "95% interval. Only where requests without speculation were timed.",
            *STREAM,
            "bound",  # estimate | low | high
        )
        self.stream_verdict = self._gauge(
            "driftguard_stream_verdict",
            "1 for the stream's present verdict; no series for every other.",
            *STREAM,
            "verdict",
        )
        self.verdict_since = self._gauge(
            "driftguard_stream_verdict_since_timestamp_seconds",
            "Since when the stream's present verdict holds, where that is known: the change point of an "
            "incident, the last arrival of a stale source.",
            *STREAM,
        )
        self.baseline_ratio = self._gauge(
            "driftguard_acceptance_baseline_ratio",
            "Acceptance rate of the segment while it was in control. Only of segments judged by all draft "
            "positions, so that it compares with the counters.",
            *STREAM,
            "segment",
        )

    def _declare_incidents(self) -> None:
        self.incidents_open = self._gauge(
            "driftguard_incidents_open", "Incidents that are not resolved.", "severity", "direction"
        )
        self.incident_info = self._gauge(
            "driftguard_incident_info",
            "1 for each incident that is not resolved, with its id and likely cause.",
            *INCIDENT,
            "incident",
            "cause",
            "confidence",
        )
        self.incident_change_point = self._gauge(
            "driftguard_incident_change_point_timestamp_seconds",
            "When the acceptance of an incident that is not resolved changed.",
            *INCIDENT,
        )
        self.incident_slowdown = self._gauge(
            "driftguard_incident_slowdown_ratio",
            "Part of the tokens per second that an incident that is not resolved costs, measured where that "
            "is sure, else by formula; negative is a gain. Only where it is known.",
            *INCIDENT,
        )
        self.incident_before = self._gauge(
            "driftguard_incident_acceptance_before_ratio",
            "Acceptance rate of a segment before the change of an incident that is not resolved.",
            *INCIDENT,
            "segment",
            "positions",  # all | first | both: the draft positions that it is of
        )
        self.incident_after = self._gauge(
            "driftguard_incident_acceptance_after_ratio",
            "Acceptance rate of a segment after the change of an incident that is not resolved.",
            *INCIDENT,
            "segment",
            "positions",
        )

    def _declare_chores(self) -> None:
        self.chore_failures = self._counter(
            "driftguard_chore_failures",
            "Failures of a recurring chore, those for want of the database left out.",
            "chore",
        )
        self.chore_last_success = self._gauge(
            "driftguard_chore_last_success_timestamp_seconds",
            "When a recurring chore last succeeded, or the sidecar started.",
            "chore",
        )
        self.loop_failures = self._counter(
            "driftguard_loop_failures",
            "Unexpected failures in a loop that goes on, those for want of the database left out.",
            "loop",
        )
        for chore in CHORES:
            self.chore_failures.labels(chore)
        for loop in LOOPS:
            self.loop_failures.labels(loop)

    def _declare_notifications(self) -> None:
        self.notifications = self._counter(
            "driftguard_notifications",
            "Attempts to deliver a notification, by kind of destination and outcome.",
            "destination",  # alertmanager | webhook
            "event",  # firing | resolved
            "outcome",  # delivered | failed | refused: the message itself, which is tried again slowly
        )
        self.notifications_undelivered = self._gauge(
            "driftguard_notifications_undelivered", "Notifications that their destination has not taken yet."
        )

    def _declare_retraining(self) -> None:
        self.retrain_runs = self._counter(
            "driftguard_retrain_runs", "Ended retraining runs by outcome.", *PLACE, "outcome"
        )
        self.retrain_last_outcome = self._gauge(
            "driftguard_retrain_last_run_outcome",
            "1 for the outcome of the newest retraining run; no series for the others, and none at all while "
            "its draft is still watched on live traffic.",
            *PLACE,
            "outcome",
        )
        self.retrain_last_run = self._gauge(
            "driftguard_retrain_last_run_timestamp_seconds",
            "When a retraining run last ended, however it did, by what had started it.",
            *PLACE,
            "trigger",  # incident | nightly | manual
        )
        self.retrain_rejected_in_a_row = self._gauge(
            "driftguard_retrain_rejected_in_a_row",
            "Candidates that the gate rejected since a draft was last put into service.",
            *PLACE,
        )
        self.retrain_last_success = self._gauge(
            "driftguard_retrain_last_success_timestamp_seconds",
            "When a retraining last ended as it should: promoted, or nothing to do.",
            *PLACE,
        )

    def _declare_sources(self) -> None:
        self.source_up = self._gauge(
            "driftguard_source_up",
            "1 if the newest scrape of this server, or export of its metrics, could be read; 0 too if its "
            "exports have stopped.",
            *SOURCE,
        )
        self.source_condition = self._gauge(
            "driftguard_source_condition",
            "1 for the condition of this server at its newest scrape or export; no series for the others.",
            *SOURCE,
            "condition",
        )
        self.source_last_success = self._gauge(
            "driftguard_source_last_success_timestamp_seconds",
            "When the metrics of this server were last scraped or pushed, and could be read.",
            *SOURCE,
        )
        self.source_scrapes = self._counter(
            "driftguard_source_scrapes",
            "Scrapes of this server, or exports of its metrics, by what came of them: a condition of "
            "driftguard_source_condition.",
            *SOURCE,
            "condition",
        )
        self.scraping_active = self._gauge(
            "driftguard_scraping_active",
            "1 if this sidecar scrapes the server, 0 if another sidecar on its database does or the database "
            "is away.",
            "source",
        )

    def _declare_streams(self) -> None:
        self.stream_speed = self._gauge(
            "driftguard_stream_tokens_per_second",
            "Decoding speed of one request, 1 / mean time per output token: in the last five minutes (now), "
            "and in the two hours before them or before the open incident (before).",
            *STREAM,
            "period",  # now | before
        )
        self.stream_k = self._gauge(
            "driftguard_stream_num_speculative_tokens",
            "K of most steps in the newest measured requests.",
            *STREAM,
        )
        self.stream_best_k = self._gauge(
            "driftguard_stream_best_num_speculative_tokens",
            "K that would be fastest now; 0 is without speculation.",
            *STREAM,
        )
        self.stream_break_even = self._gauge(
            "driftguard_stream_break_even_acceptance_ratio",
            "Acceptance rate at which the K in use is as fast as no speculation; above 1: none would do.",
            *STREAM,
        )

        self.streams = self._gauge(
            "driftguard_streams", "Streams with speculation by their present verdict.", "verdict"
        )
        self.streams_left_out = self._gauge(
            "driftguard_metrics_streams_left_out",
            "Streams without series of their own, see metrics.max_streams: without gauges, and without "
            f"counters, whose traffic is counted together as {OTHER}.",
            "series",  # gauges | counters
        )
        self.streams_left_out.labels("counters").set(0)

    def _declare_drafts(self) -> None:
        self.drafts = self._gauge("driftguard_drafts", "Known drafts by state.", *PLACE, "state")
        self.draft_in_service_since = self._gauge(
            "driftguard_draft_in_service_since_timestamp_seconds",
            "When the draft that is in service was put into service.",
            *PLACE,
            "draft_version",
        )
        self.retrain_stage = self._gauge(
            "driftguard_retrain_stage",
            "1 for the stage that a retraining is in; no series for the others.",
            *PLACE,
            "stage",
        )
        self.gate_acceptance = self._gauge(
            "driftguard_gate_acceptance_ratio",
            "Acceptance on held-out requests of the changed traffic, when the gate last decided.",
            *PLACE,
            "draft",  # in_service | candidate
        )
        self.gate_gain_lower = self._gauge(
            "driftguard_gate_gain_lower_ratio",
            "Lower 95% bound of the candidate's gain on the changed traffic.",
            *PLACE,
        )
        self.gate_loss_upper = self._gauge(
            "driftguard_gate_loss_upper_ratio",
            "Upper 95% bound of the candidate's loss in the tested group of the traffic where it is largest.",
            *PLACE,
        )
        self.gate_passed = self._gauge(
            "driftguard_gate_passed", "1 if the gate let the last candidate through.", *PLACE
        )

    def set_source(self, source: str, kind: str, condition: Condition, at: datetime) -> None:
        """After a scrape or an export, at `at`. `source`: the server's name as its records carry it."""
        self.source_scrapes.labels(source, kind, condition).inc()
        self.show_source(source, kind, condition, None if condition in DOWN else at)

    def show_source(self, source: str, kind: str, condition: Condition, answered_at: datetime | None) -> None:
        """As a `kind` that it was taken for before, it is shown no longer."""
        self.source_up.labels(source, kind).set(0 if condition in DOWN else 1)
        for name in CONDITIONS:
            if name == condition:
                self.source_condition.labels(source, kind, name).set(1)
            else:
                self.source_condition.remove_by_labels({"source": source, "kind": kind, "condition": name})
        if answered_at is not None:
            self.source_last_success.labels(source, kind).set(answered_at.timestamp())
        if self._kinds.get(source, kind) != kind:
            self.forget_source(source)
        self._kinds[source] = kind

    def set_scraping(
        self, sources: Collection[str], here: Collection[str], elsewhere: Collection[str]
    ) -> None:
        """Which of the sources this sidecar scrapes. What it found before at those that another scrapes is
        shown no longer."""
        self.replace(self.scraping_active, {(source,): float(source in here) for source in sources})
        for source in elsewhere:
            if source in self._kinds:
                self.forget_source(source)

    def forget_source(self, source: str) -> None:
        former = {"source": source, "kind": self._kinds.pop(source, "")}
        for gauge in (self.source_up, self.source_condition, self.source_last_success):
            gauge.remove_by_labels(former)

    def replace(self, gauge: Gauge, values: Mapping[tuple[str, ...], float]) -> None:
        """Shows these series (label values -> value) of a gauge that is only ever set by this, and no others.
        A series that stays is there at every moment: a scrape meanwhile must not see it missing."""
        self._set(gauge, values)
        shown = self._shown[gauge]
        for labels in shown.keys() - values.keys():
            gauge.remove(*labels)
            del shown[labels]

    def _set(self, gauge: Gauge, values: Mapping[tuple[str, ...], float]) -> None:
        """Those that changed: most do not, and setting one takes the library 3 us."""
        shown = self._shown.setdefault(gauge, {})
        for labels, value in values.items():
            if shown.get(labels) != value:
                gauge.labels(*labels).set(value)
                shown[labels] = value

    def set_ended_runs(self, totals: Iterable[tuple[str, str, str, int]]) -> None:
        """`totals`: (server, target, outcome, how many ever). Runs end in other processes too (the nightly
        job), so the counter follows what the database counts; it never goes down."""
        for server, target, outcome, total in totals:
            key = (server, target, outcome)
            counted = self._ended_runs.get(key)
            if counted is None or total > counted:
                self.retrain_runs.labels(*key).inc(total - (counted or 0))
                self._ended_runs[key] = total

    def set_last_successes(self, successes: Iterable[tuple[str, str, datetime]]) -> None:
        self._set(
            self.retrain_last_success, {(server, target): at.timestamp() for server, target, at in successes}
        )

    def count_traffic(self, stream: StreamKey, segment: str, kind: str, counts: Counts) -> None:
        key = (stream.server, stream.target, stream.draft_version, stream.method)
        labels = self._counted_as(key, segment)
        self.records.labels(*labels, kind).inc(counts.records)
        self.steps.labels(*labels, kind).inc(counts.steps)
        self.draft_tokens.labels(*labels, kind).inc(counts.drafted)
        self.accepted_tokens.labels(*labels, kind).inc(counts.accepted)
        self.emitted_tokens.labels(*labels, kind).inc(counts.emitted)

    def _counted_as(self, stream: tuple[str, ...], segment: str) -> tuple[str, ...]:
        """A counter must not begin anew while the process lives: the first streams keep theirs."""
        if stream in self._counted or len(self._counted) < self.max_streams:
            self._counted.add(stream)
            return *stream, segment
        self._counted_together.add(stream)
        self.streams_left_out.labels("counters").set(len(self._counted_together))
        return (OTHER,) * (len(stream) + 1)

    def set_open_incidents(self, counts: Iterable[tuple[str, str, int]]) -> None:
        """`counts`: (severity, direction, how many) of the incidents that are not resolved."""
        shown: dict[tuple[str, ...], float] = {
            (severity, direction): 0.0 for severity in SEVERITIES for direction in DIRECTIONS
        }
        shown.update({(severity, direction): count for severity, direction, count in counts})
        self.replace(self.incidents_open, shown)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)
