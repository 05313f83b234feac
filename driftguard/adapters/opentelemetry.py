"""Counts of speculative decoding under OpenTelemetry names of our own, for a server that we have no adapter
for; docs/otlp.md lists them. They arrive by OTLP only.

Attributes of the points tell streams and segments apart. The `gen_ai.*` metrics know of neither drafts nor
segments: they are used where a target has one window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
_USAGE = METRICS["output_tokens"]
_FIRST_TOKEN, _PER_TOKEN = METRICS["time_to_first_token_seconds"], METRICS["time_per_output_token_seconds"]
_COUNTERS = frozenset(
    METRICS[field]
    for field in ("steps", "drafted", "accepted", "drafted_per_position", "accepted_per_position")
) | sums_and_counts(_USAGE, _FIRST_TOKEN, _PER_TOKEN)


@dataclass(frozen=True, slots=True, order=True)
class _Stream:
    """What the attributes of a point say; '' where they do not."""

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
        streams = sorted({_Stream.of(labels) for labels in after.of(METRICS["drafted"])})
        of_target = Counter(stream.target for stream in streams)
        return [
            _window(stream, increase, after, known, alone=of_target[stream.target] == 1) for stream in streams
        ]


def _window(stream: _Stream, increase: Increase, after: Reading, known: Identity, *, alone: bool) -> Window:
    counts = {field: _count(increase.samples, field, stream) for field in ("steps", "drafted", "accepted")}
    running = [
        value
        for labels, value in after.of(METRICS["concurrency"]).items()
        if _target(labels) == stream.target
    ]
    return Window(
        target=stream.target or None,
        begun_at=increase.begun_at,
        ended_at=after.at,
        **counts,
        generated=_tokens(increase, stream, "output") if alone else None,
        fidelity="counter",
        speculated_before=bool(_count(after, "drafted", stream)),
        drafted_per_position=_by_position(increase, "drafted_per_position", stream),
        accepted_per_position=_by_position(increase, "accepted_per_position", stream),
        num_speculative_tokens=known.num_speculative_tokens,
        prompt_tokens=_tokens(increase, stream, "input") if alone else None,
        time_to_first_token_seconds=_mean(increase, _FIRST_TOKEN, stream) if alone else None,
        time_per_output_token_seconds=_mean(increase, _PER_TOKEN, stream) if alone else None,
        concurrency=round(sum(running)) if running and alone else None,
        draft=stream.draft or None,
        draft_version=stream.draft_version or None,
        method=stream.method or None,
        segment=stream.segment or None,
    )


def _target(labels: Labels) -> str:
    told = dict(labels)
    return next((told[name] for name in TARGET if told.get(name)), "")


def _count(samples: Reading, field: str, stream: _Stream) -> int:
    found = samples.of(METRICS[field]).items()
    return round(sum(value for labels, value in found if _Stream.of(labels) == stream))


def _by_position(increase: Increase, field: str, stream: _Stream) -> list[int] | None:
    found = increase.samples.of(METRICS[field]).items()
    own = {labels: value for labels, value in found if _Stream.of(labels) == stream}
    return by_position(METRICS[field], own, POSITION)


def _of_target(increase: Increase, name: str, stream: _Stream, **labels: str) -> float | None:
    found = increase.samples.of(name, **labels).items()
    values = [value for key, value in found if _target(key) == stream.target]
    return sum(values) if values else None


def _tokens(increase: Increase, stream: _Stream, kind: str) -> int | None:
    total = _of_target(increase, f"{_USAGE}_sum", stream, **{TOKEN_TYPE: kind})
    return None if total is None else round(total)


def _mean(increase: Increase, histogram: str, stream: _Stream) -> float | None:
    total, count = (_of_target(increase, f"{histogram}_{part}", stream) for part in ("sum", "count"))
    return total / count if total is not None and count else None


OPENTELEMETRY = OpenTelemetry()
