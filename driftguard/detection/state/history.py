"""The newest observations of a stream, kept small: 15 to 30 bytes each.

Kept in pieces, so that adding a few observations copies none of those before. Which pieces they are is
nobody's business: `wide` and the stored bytes are the same however the observations arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

WHOLE = ("ordinal", "ended_ms", "drafted", "accepted", "stratum")
FLOATS = {"expected": "<f2", "margin": "<f2", "fresh": "<f2"}
COLUMNS = (*WHOLE, *FLOATS)
COMPACT_ROWS = 512
LOOSE_PIECES = 8  # fewer than that: reading a column takes 1 us per piece, joining them 150 us
_ORDINAL = WHOLE.index("ordinal")
_WIDTHS = (1, 2, 4)  # bytes of unsigned numbers; beyond, signed ones of 8


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Some observations. Whole numbers as the smallest of their column and what each lies above it."""

    smallest: tuple[int, ...]  # of each column of WHOLE
    row: np.dtype[np.void]  # see row_of
    data: bytes  # the rows

    @classmethod
    def of(cls, columns: Mapping[str, NDArray[Any]]) -> Piece:
        """Of one observation or more."""
        smallest, widths = zip(*(_narrowest(columns[name]) for name in WHOLE), strict=True)
        all_fresh = bool((columns["fresh"] == 1.0).all())
        rows = np.empty(len(columns["expected"]), dtype=row_of(widths, all_fresh))
        for name, least in zip(WHOLE, smallest, strict=True):
            rows[name] = columns[name] - least
        for name in FLOATS:
            if name != "fresh" or not all_fresh:
                rows[name] = columns[name]
        return cls(smallest, rows.dtype, rows.tobytes())

    def __len__(self) -> int:
        return len(self.data) // self.row.itemsize

    @property
    def all_fresh(self) -> bool:
        return "fresh" not in (self.row.names or ())

    def kept(self, name: str) -> NDArray[Any]:
        """A column as it is kept; of whole numbers what lies above the smallest."""
        if name == "fresh" and self.all_fresh:
            return np.ones(len(self), dtype=FLOATS[name])
        column: NDArray[Any] = np.frombuffer(self.data, self.row)[name]
        return column

    def part(self, start: int, stop: int) -> Piece:
        size = self.row.itemsize
        return Piece(self.smallest, self.row, self.data[start * size : stop * size])


def _narrowest(values: NDArray[Any]) -> tuple[int, int]:
    """(what is subtracted, bytes) of a column."""
    smallest, largest = int(values.min()), int(values.max())
    for width in _WIDTHS:
        if largest - smallest < 256**width:
            return smallest, width
    return 0, 8


@lru_cache(maxsize=4096)
def row_of(widths: tuple[int, ...], all_fresh: bool) -> np.dtype[np.void]:
    """Fields COLUMNS, those of WHOLE with so many bytes; without `fresh` where it is 1 throughout."""
    whole = [(name, "<i8" if width == 8 else f"<u{width}") for name, width in zip(WHOLE, widths, strict=True)]
    floats = [column for column in FLOATS.items() if column[0] != "fresh" or not all_fresh]
    return np.dtype([*whole, *floats])


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The newest observations with drafted tokens, oldest first.

    `expected` and `margin` are what the bets were made against (`expectation.py`); 0 for requests of a
    reference period. In half precision: `expected` is off by .00025 at most, the others by a part in a
    thousand, which is far below what the search for a change point can tell.

    Compact pieces end after every COMPACT_ROWS-th observation of the stream, so that they do not depend on
    how the observations arrived. Piece n, counted from the stream's first observation, ends with observation
    (n + 1) COMPACT_ROWS. The oldest may hold observations that are no longer in the history.
    """

    compact: tuple[Piece, ...]
    loose: tuple[Piece, ...]  # the total % COMPACT_ROWS observations since
    length: int
    total: int  # observations of the stream, those included that are no longer in the history

    @classmethod
    def empty(cls) -> History:
        return cls((), (), 0, 0)

    @classmethod
    def of(cls, columns: Mapping[str, NDArray[Any]], total: int) -> History:
        """The newest of `total` observations."""
        length = len(columns["expected"])
        if length == 0:
            return cls((), (), 0, total)
        return cls(*_cut(columns, total), length, total)

    def __len__(self) -> int:
        return self.length

    @property
    def numbers(self) -> range:
        """Of the compact pieces."""
        end = self.total // COMPACT_ROWS
        return range(end - len(self.compact), end)

    def wide(self, name: str) -> NDArray[Any]:
        """A column as it is used: whole numbers as int64, the others as float64."""
        if self.length == 0:
            return np.zeros(0, dtype=np.int64 if name in WHOLE else np.float64)
        return _wide((*self.compact, *self.loose), name)[-self.length :]

    def count_behind(self, ordinal: int) -> int:
        """How many of the observations have a larger ordinal."""
        count = 0
        for piece in reversed((*self.compact, *self.loose)):
            above = ordinal - piece.smallest[_ORDINAL]
            if above < 0:
                count += len(piece)
                continue
            behind = len(piece) - int(np.searchsorted(piece.kept("ordinal"), above, side="right"))
            count += behind
            if behind < len(piece):
                break
        return min(count, self.length)

    def followed_by(self, rows: Any, limit: int) -> History:
        """The history with `rows` (which has the same columns, wide) at its end: at most `limit` in all."""
        if len(rows.ordinal) == 0:
            return self
        piece = Piece.of({name: getattr(rows, name) for name in COLUMNS})
        return self.followed_by_piece(piece, limit)

    def followed_by_piece(self, piece: Piece, limit: int) -> History:
        loose, total = (*self.loose, piece), self.total + len(piece)
        length = min(self.length + len(piece), limit)
        is_full = self.total // COMPACT_ROWS < total // COMPACT_ROWS
        if not is_full and len(loose) < LOOSE_PIECES:
            return History(self.compact, loose, length, total)
        compact, loose = _cut({name: _wide(loose, name) for name in COLUMNS}, total)
        kept = _newest((*self.compact, *compact), length - total % COMPACT_ROWS) if is_full else self.compact
        return History(kept, loose, length, total)


def _cut(columns: Mapping[str, NDArray[Any]], total: int) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """(compact, loose) pieces of the newest of `total` observations."""
    length = len(columns["expected"])
    first_end = COMPACT_ROWS - (total - length) % COMPACT_ROWS
    ends = [0, *range(first_end, length, COMPACT_ROWS), length]
    pieces = [
        Piece.of({name: column[start:end] for name, column in columns.items()})
        for start, end in pairwise(ends)
    ]
    whole = len(pieces) - (total % COMPACT_ROWS > 0)
    return tuple(pieces[:whole]), tuple(pieces[whole:])


def _wide(pieces: Sequence[Piece], name: str) -> NDArray[Any]:
    values = np.concatenate([piece.kept(name) for piece in pieces])
    if name in FLOATS:
        return values.astype(np.float64)
    place = WHOLE.index(name)
    smallest = np.array([piece.smallest[place] for piece in pieces], dtype=np.int64)
    return values.astype(np.int64) + np.repeat(smallest, [len(piece) for piece in pieces])


def _newest(pieces: tuple[Piece, ...], length: int) -> tuple[Piece, ...]:
    """The last of the pieces that hold `length` observations together."""
    first, before = len(pieces), 0
    while first > 0 and before < length:
        first -= 1
        before += len(pieces[first])
    return pieces[first:]
