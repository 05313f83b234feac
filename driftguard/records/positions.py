"""Whether a record is judged by all draft positions, or by the first alone.

If a record names no K, K may have changed from step to step, for example because the server chooses it by
acceptance. Then accepted / drafted changes with K without any drift, because later positions are accepted
less often; and since K follows acceptance, it cannot be controlled for. Whether the first draft token is
accepted does not depend on how many follow it (except through where steps begin: docs/adaptive-k.md). So such
a record is judged by its first position, if it has counts of that.

The same holds of records that name their K, where it changes again and again from one to the next: that the
detector sees in the stream (`driftguard.detection.statistics.strata`).

A window of a counter is always judged by all positions: servers whose metrics do not name K mostly have a
fixed one, and a window is weighted by its number of draft tokens
(`driftguard.detection.statistics.windows`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

Positions = Literal["all", "first", "both"]  # both: some records by all, some by the first

POSITIONS_SUMMED: Final = 16  # the first ones, in rollups and metrics

ACCEPTANCE: Final[dict[Positions, str]] = {
    "all": "acceptance",
    "first": "acceptance of the first draft token",
    "both": "acceptance (where K varies, of the first draft token)",
}


def first_counts(kind: str, drafted: int | None, accepted: int | None) -> tuple[int, int] | None:
    """(drafted, accepted) of a record's first position; None where it is not known, or of a window."""
    if kind == "window" or drafted is None or accepted is None:
        return None
    return drafted, accepted


def first_position(
    kind: str, num_speculative_tokens: int | None, drafted: int | None, accepted: int | None
) -> tuple[int, int] | None:
    """(drafted, accepted) of the first position if the record is judged by that, None if by its totals.

    `drafted` and `accepted` are those of its first position, None if unknown.
    """
    return None if num_speculative_tokens is not None else first_counts(kind, drafted, accepted)


def combined(parts: Iterable[Positions]) -> Positions:
    """The positions of several records together; "all" for none."""
    found = set(parts)
    return found.pop() if len(found) == 1 else "both" if found else "all"


def per_position(
    steps: int, drafted: Sequence[int] | None, accepted: Sequence[int] | None
) -> list[tuple[int, int]]:
    """(drafted, accepted) at each of the first POSITIONS_SUMMED positions of one record; empty where it does
    not tell how many were accepted there. Where it does not tell how many were drafted there, every step
    counts, as in vLLM's own log."""
    kept = (accepted or ())[:POSITIONS_SUMMED]
    return list(zip([steps] * len(kept) if drafted is None else drafted, kept, strict=False))
