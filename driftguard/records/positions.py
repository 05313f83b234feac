"""By which draft positions a record is judged: by all of them, or by the first alone.

Where a record names no K, K may have changed from step to step, as where a server chooses it by what is
accepted. accepted / drafted then moves with K and without any drift, because later positions are accepted
less often; and as K follows acceptance, it cannot be held fixed either. Whether the first draft token is
accepted does not depend on how many follow it (but for where steps begin: docs/adaptive-k.md). So such
a record is judged by its first position, where it has counts of that.

A window of a counter is judged by all positions whatever it tells: servers whose metrics do not name K mostly
have a fixed one, and a window is compared by how many draft tokens it holds
(`driftguard.detection.statistics.windows`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

Positions = Literal["all", "first", "both"]  # both: some records by all, some by the first

ACCEPTANCE: Final[dict[Positions, str]] = {
    "all": "acceptance",
    "first": "acceptance of the first draft token",
    "both": "acceptance (where K varies, of the first draft token)",
}


def first_position(
    kind: str, num_speculative_tokens: int | None, drafted: int | None, accepted: int | None
) -> tuple[int, int] | None:
    """(drafted, accepted) by which a record is judged instead of its totals, None where by its totals.

    `drafted` and `accepted` are those of its first position, None where it does not tell.
    """
    if kind == "window" or num_speculative_tokens is not None or drafted is None or accepted is None:
        return None
    return drafted, accepted


def combined(parts: Iterable[Positions]) -> Positions:
    """Of several at once; "all" of none."""
    found = set(parts)
    return found.pop() if len(found) == 1 else "both" if found else "all"
