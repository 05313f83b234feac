"""The newest observations of a stream, kept small: 20 to 30 bytes each."""

from __future__ import annotations

from dataclasses import dataclass, fields
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
        joined = {
            item.name: np.concatenate([self.wide(item.name), getattr(rows, item.name)])[-limit:]
            for item in fields(self)
        }
        columns: dict[str, Any] = {name: Narrow.of(joined[name].astype(np.int64)) for name in _WHOLE}
        columns |= {name: joined[name].astype(width) for name, width in _FLOATS}
        return History(**columns)


_FLOATS = (("expected", np.float32), ("margin", np.float16), ("fresh", np.float16))
_WHOLE = ("ordinal", "ended_ms", "drafted", "accepted", "stratum")
