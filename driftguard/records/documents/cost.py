"""The measured cost of speculation; stored as JSON with an incident and with a stream."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with a 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Decoding of some requests. Before and after a change: both in the mix of strata after it."""

    tokens_per_second: float  # per request: 1 / mean time per output token
    time_per_output_token_seconds: float
    tokens_per_step: float
    seconds_per_step: float
    requests: int


@dataclass(frozen=True, slots=True)
class SeenK:
    """How many timed requests had this K; 0 is without speculation."""

    num_speculative_tokens: int
    requests: int


@dataclass(frozen=True, slots=True)
class StepTime:
    """t(K) = seconds + seconds_per_draft_token x K (+ seconds_of_speculating where K > 0)."""

    seconds: float
    seconds_error: float  # standard error
    seconds_per_draft_token: float
    seconds_per_draft_token_error: float
    seconds_of_speculating: float | None  # None if it could not be estimated separately
    seen: tuple[SeenK, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """The predicted speed with one K at the current acceptance."""

    num_speculative_tokens: int
    tokens_per_step: float
    seconds_per_step: float
    tokens_per_second: float
    gain: Interval  # of tokens per second, against the K in use
    measured: bool  # requests with this K were timed


@dataclass(frozen=True, slots=True)
class LoadSpeedup:
    """Speculation with the K in use against none, at one load: `factor` of the tokens per second.

    concurrency: the fewest and the most requests at once; None where the records do not tell. now: it is the
    load of most of the newest requests. missing: why there is no factor, and how to have it; else None.
    """

    concurrency: tuple[int, int] | None
    now: bool
    requests: int  # timed with the K in use
    requests_without: int  # timed without speculation
    factor: Interval | None = None
    tokens_per_second: float | None = None
    tokens_per_second_without: float | None = None
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """`best`: 0 if no K is faster than no speculation by more than the uncertainty. `sure`: it is faster than
    the K in use by more than the uncertainty; False if the K in use is the best.

    break_even_acceptance: the acceptance rate (accepted / drafted) at which the K in use is as fast as
    no speculation; above 1 if no acceptance is enough.
    """

    now: Speed
    before: Speed | None = None
    lost: Interval | None = None  # part of the tokens per second, negative where gained
    num_speculative_tokens: int | None = None  # the K in use: of most steps in the newest requests
    acceptance_rate: float | None = None  # at that K
    step_time: StepTime | None = None
    choices: tuple[Choice, ...] = ()
    best: int | None = None
    sure: bool = False
    break_even_acceptance: Interval | None = None
    notes: tuple[str, ...] = ()  # what limits these numbers, and how to improve them
    loads: tuple[LoadSpeedup, ...] = ()  # the quietest first

    @property
    def speedup(self) -> LoadSpeedup | None:
        """At the load there is now; None where nothing was drafted or timed."""
        return next((load for load in self.loads if load.now), None)
