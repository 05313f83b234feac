"""The newest observations of a stream, kept small: 20 to 30 bytes each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_WIDTHS = (np.uint8, np.uint16, np.uint32)


@dataclass(frozen=True, slots=True, eq=False)
class Narrow:
    """Whole numbers as the smallest of them and what each lies above it, in the narrowest type."""

    smallest: int
    above: NDArray[Any]  # unsigned, or int64 where the range is wider than 32 bits

    @classmethod
    def of(cls, values: Ints) -> Narrow:
        if len(values) == 0:
            return cls(0, np.zeros(0, dtype=np.uint8))
        smallest, largest = int(values.min()), int(values.max())
        for width in _WIDTHS:
            if largest - smallest <= np.iinfo(width).max:
                return cls(smallest, (values - smallest).astype(width))
        return cls(0, values.astype(np.int64))

    def followed_by(self, added: NDArray[Any], limit: int) -> Narrow:
        """These and then `added`, the last `limit` of them. As wide as it was where the new ones fit."""
        above = added.astype(np.int64) - self.smallest
        if len(above) and above.min() >= 0 and above.max() <= np.iinfo(self.above.dtype).max:
            return Narrow(
                self.smallest, np.concatenate([self.above, above.astype(self.above.dtype)])[-limit:]
            )
        return Narrow.of(np.concatenate([self.values, added.astype(np.int64)])[-limit:])

    @property
    def values(self) -> Ints:
        return self.above.astype(np.int64) + self.smallest


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The newest observations with drafted tokens, oldest first, all columns of one length H.

    `expected` and `margin` are what the bets were made against (`predictive.py`); 0 for requests of a
    reference period. Half precision of the margin is a part in a thousand.
    """

    ordinal: Narrow
    ended_ms: Narrow  # milliseconds since 1970 UTC
    drafted: Narrow
    accepted: Narrow
    stratum: Narrow
    expected: NDArray[np.float32]
    margin: NDArray[np.float16]
    fresh: NDArray[np.float16]

    @classmethod
    def empty(cls) -> History:
        none = Narrow.of(np.zeros(0, dtype=np.int64))
        half = np.zeros(0, dtype=np.float16)
        return cls(none, none, none, none, none, np.zeros(0, dtype=np.float32), half, half)

    def __len__(self) -> int:
        return len(self.expected)

    def wide(self, name: str) -> NDArray[Any]:
        """A column as it is used: whole numbers as int64, the others as float64."""
        column = getattr(self, name)
        return column.values if isinstance(column, Narrow) else column.astype(np.float64)

    def followed_by(self, rows: Any, limit: int) -> History:
        """The history with `rows` (which has the same columns, wide) at its end: at most `limit` in all."""
        columns: dict[str, Any] = {
            name: getattr(self, name).followed_by(getattr(rows, name), limit) for name in _WHOLE
        }
        for name, width in _FLOATS:
            added = getattr(rows, name).astype(width)
            columns[name] = np.concatenate([getattr(self, name), added])[-limit:]
        return History(**columns)


_FLOATS = (("expected", np.float32), ("margin", np.float16), ("fresh", np.float16))
_WHOLE = ("ordinal", "ended_ms", "drafted", "accepted", "stratum")
