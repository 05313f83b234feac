"""Does speculation pay, at the load there is now? A statement of its own, beside what acceptance does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from driftguard.records.documents.cost import Cost, Interval, LoadSpeedup

Payoff = Literal["pays", "loses", "uncertain", "unknown"]

UNTIMED: Final = "fewer than ten of the newest requests or windows have time_per_output_token_seconds"
NOT_DRAFTED: Final = "the newest timed requests had no draft tokens"
FILLED_IN: Final = (
    "the times of the requests never vary or are too few of a kind, so they were not measured: send the "
    "time_per_output_token_seconds that each request took"
)
OUTDATED: Final = "the newest requests have not been measured yet"


@dataclass(frozen=True, slots=True)
class Speculation:
    """Whether speculation pays, in values and in one sentence.

    state: "pays" where the 95% interval of the factor lies above 1, "loses" where it lies below, "uncertain"
    where 1 is in it, "unknown" where there is none; `missing` then says what to send. factor: tokens per
    second with the K in use, as a multiple of those without speculation. concurrency: the fewest and the
    most requests at once of that load; None where not told.
    """

    state: Payoff
    text: str
    factor: Interval | None = None
    concurrency: tuple[int, int] | None = None
    tokens_per_second: float | None = None
    tokens_per_second_without: float | None = None
    missing: str | None = None


def payoff(cost: Cost | None, *, outdated: bool = False) -> Speculation:
    """At the load of now. `outdated`: measured too long ago to be true of the newest requests."""
    if cost is None:
        return _unknown(UNTIMED)
    if outdated:
        return _unknown(OUTDATED)
    if cost.num_speculative_tokens is None:
        return _unknown(NOT_DRAFTED)
    found = cost.speedup
    if found is None or found.factor is None:
        missing = found.missing if found is not None and found.missing is not None else FILLED_IN
        return _unknown(missing, found.concurrency if found else None)
    return Speculation(
        state=state_of(found.factor),
        text=_text(found, found.factor),
        factor=found.factor,
        concurrency=found.concurrency,
        tokens_per_second=found.tokens_per_second,
        tokens_per_second_without=found.tokens_per_second_without,
    )


def state_of(factor: Interval) -> Payoff:
    if factor.high < 1.0:
        return "loses"
    return "pays" if factor.low > 1.0 else "uncertain"


def load_text(concurrency: tuple[int, int] | None) -> str:
    """For example: at 9 to 16 requests at once."""
    if concurrency is None:
        return "under a load that the records do not tell"
    return f"at {concurrency_words(concurrency)} request{'' if concurrency[1] == 1 else 's'} at once"


def concurrency_words(concurrency: tuple[int, int] | None) -> str:
    """For example: 9 to 16; unknown where the records do not tell."""
    if concurrency is None:
        return "unknown"
    fewest, most = concurrency
    return str(most) if fewest == most else f"{fewest} to {most}"


_BEGINS: Final = {
    "loses": "Speculation loses here",
    "pays": "Speculation pays",
    "uncertain": "Whether speculation pays is uncertain",
}


def _text(found: LoadSpeedup, factor: Interval) -> str:
    return (
        f"{_BEGINS[state_of(factor)]}: {found.tokens_per_second:.1f} tokens/s, "
        f"{found.tokens_per_second_without:.1f} without ({factor.value:.2f} times, {factor.low:.2f} to "
        f"{factor.high:.2f}), {load_text(found.concurrency)}."
    )


def _unknown(missing: str, concurrency: tuple[int, int] | None = None) -> Speculation:
    text = f"Whether speculation pays is not known: {missing}."
    return Speculation("unknown", text, concurrency=concurrency, missing=missing)
