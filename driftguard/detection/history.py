"""The newest observations of a stream, kept small: 15 to 30 bytes each.

Kept in pieces, so that adding a few observations copies none of those before. Which pieces they are is
nobody's business: `wide` and the stored bytes are the same however the observations arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

WHOLE = ("ordinal", "ended_ms", "drafted", "accepted", "stratum")
FLOATS = {"expected": np.float32, "margin": np.float16, "fresh": np.float16}
COLUMNS = (*WHOLE, *FLOATS)
COMPACT_ROWS = 512  # least rows of a piece that is left as it is
LOOSE_PIECES = 32  # at most that many smaller ones
_WIDTHS = (np.uint8, np.uint16, np.uint32)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Some observations. Whole numbers as the smallest of their column and what each lies above it."""

    smallest: tuple[int, ...]  # of each column of WHOLE
    row: np.dtype[np.void]  # fields COLUMNS, whole ones in the narrowest type: unsigned, int64 beyond 32 bits
    data: bytes  # the rows

    @classmethod
    def of(cls, columns: Mapping[str, NDArray[Any]]) -> Piece:
        """Of one observation or more."""
        smallest, widths = zip(*(_narrowest(columns[name]) for name in WHOLE), strict=True)
        rows = np.empty(len(columns["expected"]), dtype=_row(widths))
        for name, least in zip(WHOLE, smallest, strict=True):
            rows[name] = columns[name] - least
        for name in FLOATS:
            rows[name] = columns[name]
        return cls(smallest, rows.dtype, rows.tobytes())

    def __len__(self) -> int:
        return len(self.data) // self.row.itemsize

    def part(self, start: int, stop: int) -> Piece:
        size = self.row.itemsize
        return Piece(self.smallest, self.row, self.data[start * size : stop * size])

    def parts(self) -> tuple[Piece, ...]:
        return tuple(self.part(start, start + COMPACT_ROWS) for start in range(0, len(self), COMPACT_ROWS))


def _narrowest(values: NDArray[Any]) -> tuple[int, type[np.integer[Any]]]:
    smallest, largest = int(values.min()), int(values.max())
    for width in _WIDTHS:
        if largest - smallest <= np.iinfo(width).max:
            return smallest, width
    return 0, np.int64


@lru_cache(maxsize=4096)
def _row(widths: tuple[type[np.integer[Any]], ...]) -> np.dtype[np.void]:
    return np.dtype([*zip(WHOLE, widths, strict=True), *FLOATS.items()])


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The newest observations with drafted tokens, oldest first.

    `expected` and `margin` are what the bets were made against (`predictive.py`); 0 for requests of a
    reference period. Half precision of the margin is a part in a thousand.
    """

    compact: tuple[Piece, ...]  # the first of them may hold observations that are no longer in the history
    loose: tuple[Piece, ...]  # newer ones
    loose_rows: int
    length: int

    @classmethod
    def empty(cls) -> History:
        return cls((), (), 0, 0)

    @classmethod
    def of(cls, columns: Mapping[str, NDArray[Any]]) -> History:
        length = len(columns["expected"])
        return cls(Piece.of(columns).parts() if length else (), (), 0, length)

    def __len__(self) -> int:
        return self.length

    def wide(self, name: str) -> NDArray[Any]:
        """A column as it is used: whole numbers as int64, the others as float64."""
        if self.length == 0:
            return np.zeros(0, dtype=np.int64 if name in WHOLE else np.float64)
        return _wide((*self.compact, *self.loose), name)[-self.length :]

    def followed_by(self, rows: Any, limit: int) -> History:
        """The history with `rows` (which has the same columns, wide) at its end: at most `limit` in all."""
        if len(rows) == 0:
            return self
        piece = Piece.of({name: getattr(rows, name) for name in COLUMNS})
        return self.followed_by_piece(piece, limit)

    def followed_by_piece(self, piece: Piece, limit: int) -> History:
        added = len(piece)
        length = min(self.length + added, limit)
        loose, loose_rows = (*self.loose, piece), self.loose_rows + added
        if loose_rows < COMPACT_ROWS and len(loose) < LOOSE_PIECES:
            return History(self.compact, loose, loose_rows, length)
        joined = Piece.of({name: _wide(loose, name) for name in COLUMNS})
        if loose_rows < COMPACT_ROWS:
            return History(self.compact, (joined,), loose_rows, length)
        return History(_newest((*self.compact, *joined.parts()), length), (), 0, length)


def _wide(pieces: Sequence[Piece], name: str) -> NDArray[Any]:
    values = np.concatenate([np.frombuffer(piece.data, piece.row)[name] for piece in pieces])
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
