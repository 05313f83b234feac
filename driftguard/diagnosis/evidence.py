"""What a diagnosis is made from, gathered by driftguard.store.examination_evidence. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from driftguard.records.documents.goodput import GoodputChange
from driftguard.records.documents.serving_scores import MissingScores, ServingScores

Direction = Literal["down", "up", "slower"]  # of acceptance; slower: of goodput


@dataclass(frozen=True, slots=True)
class Observed:
    """One record of the stream, before or after the change point. None where its source does not tell."""

    segment: str
    steps: int
    drafted: int
    accepted: int
    num_speculative_tokens: int | None = None
    acceptance_rule: str = "unknown"
    verification: str = "unknown"
    temperature: float | None = None
    concurrency: int | None = None
    waiting_requests: int | None = None
    first_drafted: int | None = None  # steps that drafted position 1, and those that accepted it
    first_accepted: int | None = None
    by_first: bool = False  # judged by position 1 (driftguard.records.positions)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt, from the server's prefix cache
    output_tokens: int | None = None
    time_per_output_token_seconds: float | None = None
    session: str | None = None
    ended_at: float | None = None  # seconds since 1970, as is the next
    server_started_at: float | None = None  # the server's process that served it

    @property
    def cached_share(self) -> float | None:
        """Part of the prompt that came from the prefix cache."""
        if self.cached_tokens is None or not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One replay of one canary prompt, greedy. `answer`: digest of the text that came back. `is_warm`: asked
    again at once, so that the server had its beginning in the prefix cache."""

    prompt: str
    answer: str
    drafted: int
    accepted: int
    is_warm: bool = False
    first_drafted: int | None = None  # at position 1
    first_accepted: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    ended_at: float | None = None  # seconds since 1970, as is the next
    server_started_at: float | None = None


@dataclass(frozen=True, slots=True)
class Captured:
    """Token ids of one captured request, and the counts of its record where that is known."""

    record_id: str
    segment: str
    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    session: str | None = None
    drafted: int | None = None
    accepted: int | None = None


@dataclass(frozen=True, slots=True)
class EngineChange:
    """Another version of the engine, or another engine, near the change of acceptance. `noticed_at`: when it
    was first read; `seconds_before` that change, negative where it was read later."""

    before: str  # such as vLLM 0.31.0
    after: str
    noticed_at: datetime
    seconds_before: float

    @property
    def in_words(self) -> str:
        """For example: vLLM 0.31.0 became vLLM 0.32.0 at 14:03 UTC, 4 minutes before the change."""
        minutes = round(abs(self.seconds_before) / 60.0)
        plural = "s" if minutes != 1 else ""
        side = "before" if self.seconds_before >= 0.0 else "after"
        distance = f"{minutes} minute{plural} {side} the change" if minutes else "at the time of the change"
        return f"{self.before} became {self.after} at {self.noticed_at:%H:%M} UTC, {distance}"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything known about one incident. Empty where nothing is known.

    `before` and `after` are requests of all segments on both sides of the change point; captures likewise.
    `changed`: of the segments that changed those that are not back.
    `probes_awaited`: there are probes from before the change and it is worth waiting for those after it.
    `replaced_target`: the target that the server served before, when this stream began by its replacement;
    `before` are then requests of the stream before. `replaced_draft`: likewise, the draft version.
    `engine_change`: None where none is known. `goodput`: of an incident of direction "slower". `scores`: of
    captured requests, offline; `missing_scores`: why the newest try made none.
    """

    direction: Direction
    changed: tuple[str, ...]
    before: tuple[Observed, ...]
    after: tuple[Observed, ...]
    probes_before: tuple[ProbeResult, ...] = ()
    probes_after: tuple[ProbeResult, ...] = ()
    probes_awaited: bool = False
    captures_before: tuple[Captured, ...] = ()
    captures_after: tuple[Captured, ...] = ()
    replaced_target: str | None = None
    replaced_draft: str | None = None
    engine_change: EngineChange | None = None
    goodput: GoodputChange | None = None
    scores: ServingScores | None = None
    missing_scores: MissingScores | None = None
