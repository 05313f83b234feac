"""Counts of speculative decoding under DriftGuard's own OpenTelemetry names, for servers without an adapter;
docs/otlp.md lists them. They arrive by OTLP only.

Attributes of the points distinguish streams and segments. The `gen_ai.*` metrics have neither drafts nor
segments: they are used if a target has a single window.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from driftguard.adapters.adapter import Kind
from driftguard.adapters.otlp_identity import PREFIX, TARGET
from driftguard.adapters.reading import Increase, Labels, Reading, by_position, sums_and_counts
from driftguard.adapters.window import Identity, Window
from driftguard.records import Fidelity

POSITION = "driftguard.position"
TOKEN_TYPE = "gen_ai.token.type"  # noqa: S105 (the name of an attribute)

# Field of the record -> metric.
METRICS: Mapping[str, str] = {
    "steps": "driftguard.steps",
    "drafted": "driftguard.drafted_tokens",
    "accepted": "driftguard.accepted_tokens",
    "drafted_per_position": "driftguard.drafted_per_position",
    "accepted_per_position": "driftguard.accepted_per_position",
    "concurrency": "driftguard.concurrency",
    "prompt_tokens": "gen_ai.client.token.usage",
    "output_tokens": "gen_ai.client.token.usage",
    "time_to_first_token_seconds": "gen_ai.server.time_to_first_token",
    "time_per_output_token_seconds": "gen_ai.server.time_per_output_token",
}
Series = Mapping[Labels, float]
_USAGE = METRICS["output_tokens"]
_FIRST_TOKEN, _PER_TOKEN = METRICS["time_to_first_token_seconds"], METRICS["time_per_output_token_seconds"]
_COUNTERS = frozenset(
    METRICS[field]
    for field in ("steps", "drafted", "accepted", "drafted_per_position", "accepted_per_position")
) | sums_and_counts(_USAGE, _FIRST_TOKEN, _PER_TOKEN)


@dataclass(frozen=True, slots=True, order=True)
class _Stream:
    """The names in the attributes of a point; '' if there is none."""

    target: str
    draft: str
    draft_version: str
    method: str
    segment: str

    @classmethod
    def of(cls, labels: Labels) -> _Stream:
        told = dict(labels)
        others = (told.get(f"{PREFIX}{name}", "") for name in ("draft", "draft_version", "method", "segment"))
        return cls(_target(labels), *others)


@dataclass(frozen=True, slots=True)
class _Reading:
    """A reading, indexed so that each series is read only once for any number of streams: samples by
    metric and stream, and by metric and target."""

    by_stream: Mapping[tuple[str, _Stream], Series]
    by_target: Mapping[tuple[str, str], Series]

    @classmethod
    def of(cls, reading: Reading) -> _Reading:
        by_stream: dict[tuple[str, _Stream], dict[Labels, float]] = defaultdict(dict)
        by_target: dict[tuple[str, str], dict[Labels, float]] = defaultdict(dict)
        for name, series in reading.samples.items():
            for labels, value in series.items():
                stream = _Stream.of(labels)
                by_stream[name, stream][labels] = by_target[name, stream.target][labels] = value
        return cls(by_stream, by_target)

    def streams(self) -> list[_Stream]:
        return sorted(stream for name, stream in self.by_stream if name == METRICS["drafted"])

    def count(self, field: str, stream: _Stream) -> int:
        return round(sum(self.by_stream.get((METRICS[field], stream), {}).values()))

    def by_position(self, field: str, stream: _Stream) -> list[int] | None:
        """Raises Incomplete."""
        return by_position(METRICS[field], self.by_stream.get((METRICS[field], stream), {}), POSITION)

    def of_target(self, name: str, target: str, **labels: str) -> float | None:
        wanted = frozenset(labels.items())
        found = self.by_target.get((name, target), {}).items()
        values = [value for key, value in found if wanted <= key]
        return sum(values) if values else None

    def tokens(self, target: str, kind: str) -> int | None:
        total = self.of_target(f"{_USAGE}_sum", target, **{TOKEN_TYPE: kind})
        return None if total is None else round(total)

    def mean(self, histogram: str, target: str) -> float | None:
        total, count = (self.of_target(f"{histogram}_{part}", target) for part in ("sum", "count"))
        return total / count if total is not None and count else None


class OpenTelemetry:
    kind: Kind = "opentelemetry"
    name = "OpenTelemetry"
    prefix = PREFIX
    path = ""
    names = _COUNTERS | {METRICS["concurrency"]}
    fidelity: Fidelity = "counter"
    names_target = True
    show_metrics = "export the metrics that docs/otlp.md lists"
    speculate = f"{METRICS['drafted']} counts draft tokens"

    def windows(self, before: Reading, after: Reading, known: Identity) -> Sequence[Window]:
        increase = Increase.between(before, after, _COUNTERS)
        gained, now = _Reading.of(increase.samples), _Reading.of(after)
        streams = now.streams()
        of_target = Counter(stream.target for stream in streams)
        return [
            _window(stream, gained, now, known, (increase.begun_at, after.at), of_target[stream.target] == 1)
            for stream in streams
        ]


def _window(
    stream: _Stream,
    gained: _Reading,
    now: _Reading,
    known: Identity,
    interval: tuple[datetime, datetime],
    alone: bool,
) -> Window:
    """`alone`: whether it is the only stream of its target."""
    target = stream.target
    running = now.of_target(METRICS["concurrency"], target)
    return Window(
        target=target or None,
        begun_at=interval[0],
        ended_at=interval[1],
        steps=gained.count("steps", stream),
        drafted=gained.count("drafted", stream),
        accepted=gained.count("accepted", stream),
        generated=gained.tokens(target, "output") if alone else None,
        fidelity="counter",
        speculated_before=bool(now.count("drafted", stream)),
        drafted_per_position=gained.by_position("drafted_per_position", stream),
        accepted_per_position=gained.by_position("accepted_per_position", stream),
        num_speculative_tokens=known.num_speculative_tokens,
        prompt_tokens=gained.tokens(target, "input") if alone else None,
        time_to_first_token_seconds=gained.mean(_FIRST_TOKEN, target) if alone else None,
        time_per_output_token_seconds=gained.mean(_PER_TOKEN, target) if alone else None,
        concurrency=None if running is None or not alone else round(running),
        draft=stream.draft or None,
        draft_version=stream.draft_version or None,
        method=stream.method or None,
        segment=stream.segment or None,
    )


def _target(labels: Labels) -> str:
    told = dict(labels)
    return next((told[name] for name in TARGET if told.get(name)), "")


OPENTELEMETRY = OpenTelemetry()
