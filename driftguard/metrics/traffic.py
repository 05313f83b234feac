"""The contents of the folded records, as counters."""

from __future__ import annotations

from typing import Protocol

from prometheus_client import Gauge

from driftguard.metrics.labels import OTHER, STREAM, TRAFFIC
from driftguard.metrics.series import Series
from driftguard.records import StreamKey


class Counts(Protocol):
    """Counts of records of one stream, segment and kind."""

    records: int
    steps: int
    drafted: int
    accepted: int
    emitted: int
    positions: dict[int, tuple[int, int]]  # place in a draft, from 1 -> drafted, accepted


class TrafficMetrics:
    def __init__(self, series: Series, max_streams: int, left_out: Gauge) -> None:
        self._max_streams = max_streams
        self._left_out = left_out
        self._counted: set[tuple[str, ...]] = set()  # streams with counters of their own
        self._counted_together: set[tuple[str, ...]] = set()
        self.records = series.counter(
            "driftguard_records", "Acceptance records folded by the detector.", *TRAFFIC
        )
        self.steps = series.counter("driftguard_steps", "Verification steps in the folded records.", *TRAFFIC)
        self.draft_tokens = series.counter(
            "driftguard_draft_tokens", "Draft tokens offered to the target.", *TRAFFIC
        )
        self.accepted_tokens = series.counter(
            "driftguard_accepted_tokens", "Draft tokens that the target accepted.", *TRAFFIC
        )
        self.emitted_tokens = series.counter(
            "driftguard_emitted_tokens", "Tokens emitted: accepted plus bonus tokens.", *TRAFFIC
        )
        at_position = (*STREAM, "kind", "position")
        self.drafted_per_position = series.counter(
            "driftguard_draft_tokens_per_position",
            "Draft tokens offered at a position of the draft, from 1 to at most 16. Of records that tell how "
            "many were accepted there; one that does not tell how many were offered counts its steps.",
            *at_position,
        )
        self.accepted_per_position = series.counter(
            "driftguard_accepted_tokens_per_position",
            "Draft tokens that the target accepted at a position of the draft, of the same records.",
            *at_position,
        )

    def count(self, stream: StreamKey, segment: str, kind: str, counts: Counts) -> None:
        key = (stream.server, stream.target, stream.draft_version, stream.method)
        labels = self._counted_as(key, segment)
        self.records.labels(*labels, kind).inc(counts.records)
        self.steps.labels(*labels, kind).inc(counts.steps)
        self.draft_tokens.labels(*labels, kind).inc(counts.drafted)
        self.accepted_tokens.labels(*labels, kind).inc(counts.accepted)
        self.emitted_tokens.labels(*labels, kind).inc(counts.emitted)
        for position, (drafted, accepted) in counts.positions.items():
            at = (*labels[:-1], kind, str(position))
            self.drafted_per_position.labels(*at).inc(drafted)
            self.accepted_per_position.labels(*at).inc(accepted)

    def _counted_as(self, stream: tuple[str, ...], segment: str) -> tuple[str, ...]:
        """A counter must not restart while the process runs, so the first streams keep theirs."""
        if stream in self._counted or len(self._counted) < self._max_streams:
            self._counted.add(stream)
            return *stream, segment
        self._counted_together.add(stream)
        self._left_out.labels("counters").set(len(self._counted_together))
        return (OTHER,) * (len(stream) + 1)
