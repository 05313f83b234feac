"""The cost of speculation in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from driftguard.cost.sample import UNKNOWN_BAND
from driftguard.records.documents.cost import Cost

ENOUGH: Final = "one in a hundred and at least ten a day, under the usual load"
LEAST_GAIN: Final = 0.02  # of the tokens per second: what is worth telling

ALIKE: Final = (
    "the records do not tell which positions were accepted, so each is taken to be accepted alike: "
    "send accepted_per_position"
)
UNMEASURED: Final = (
    "time_per_output_token_seconds never varies in some or all of these requests, so it was not measured: "
    "no loss and no best K is told from them, and a loss is told by formula"
)
IMPLAUSIBLE: Final = (
    "a step takes less time with more draft tokens, so the requests of different K differ in something else "
    "too, and no best K is told: send requests of each K in the same hours"
)


def advice(cost: Cost) -> str | None:
    """What to set K to; None where that is not sure or not worth telling."""
    gain = next((item.gain.value for item in cost.choices if item.num_speculative_tokens == cost.best), 0.0)
    if cost.best is None or not cost.sure or gain < LEAST_GAIN:
        return None
    faster = f"about {100.0 * gain:.0f}% faster"
    if cost.best == 0:
        return f"speculation off would now be faster ({faster})"
    against = f"{faster} than K = {cost.num_speculative_tokens}"
    if all(item.num_speculative_tokens < cost.best for item in cost.choices if item.measured):
        return f"a larger K would now be better (K = {cost.best}: {against}, if the trend goes on)"
    return f"K = {cost.best} would now be best ({against})"


def limits(ks: Sequence[int], band: int | None, k: int) -> tuple[str, ...]:
    """What the K that were seen, in order, and the band of concurrency leave open."""
    notes = []
    if band is None or band == UNKNOWN_BAND:
        notes.append("the records do not tell the concurrency, so times under different load are mixed")
    else:
        notes.append(f"seconds per step are those at a concurrency of {_band_text(band)}")
    if len(ks) < 2:
        notes.append(
            f"only K = {k} was timed, so neither the best K nor the break-even is known: "
            f"send some requests with another K and some without speculation, {ENOUGH}"
        )
    elif 0 not in ks:
        notes.append(
            "no request without speculation was timed, so whether speculation pays is not known: "
            f"send some, {ENOUGH}"
        )
    elif len(ks) == 2:
        notes.append(
            f"seconds per step at other K lie on a straight line through K = 0 and K = {k}: "
            "send some requests with another K to be sure of the best"
        )
    return tuple(notes)


def _band_text(band: int) -> str:
    return str(band + 1) if band <= 1 else f"{2 ** (band - 1) + 1} to {2**band}"
