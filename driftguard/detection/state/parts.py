"""A state in parts, of which most are written once: what changes with every request, and compact history.

The head is the state with its loose history only (`history.py`), in the format of `codec.py`. A compact piece
never changes; it is needed until all of it has fallen out of the history.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from driftguard.detection.state.codec import UnreadableState, decode_state, encode_state
from driftguard.detection.state.history import COMPACT_ROWS, WHOLE, History, Piece, row_of
from driftguard.detection.state.stream_state import StreamState

_CHECKSUM_BYTES = 4


@dataclass(frozen=True, slots=True)
class StoredState:
    """Bytes of one state."""

    head: bytes
    history_rows: int | None  # None: the head holds the whole history, as before there were pieces
    pieces: Mapping[int, bytes]  # by number


class _Piece(msgspec.Struct, array_like=True):
    smallest: tuple[int, ...]
    widths: tuple[int, ...]
    all_fresh: bool
    data: bytes


def parts_of(state: StreamState, known: range) -> StoredState:
    """The head, and the compact pieces but for those `known`, which were stored before."""
    history = state.history
    loose = History((), history.loose, history.total % COMPACT_ROWS, history.total)
    pieces = zip(history.numbers, history.compact, strict=True)
    return StoredState(
        encode_state(replace(state, history=loose)),
        len(history),
        {number: _encoded(piece) for number, piece in pieces if number not in known},
    )


def from_parts(stored: StoredState) -> StreamState:
    """Raises OtherVersion, or UnreadableState: parts that are damaged or missing."""
    state = decode_state(stored.head)
    if stored.history_rows is None:
        return state
    own = state.history
    end = own.total // COMPACT_ROWS
    numbers = sorted(stored.pieces)
    pieces = tuple(_decoded(stored.pieces[number]) for number in numbers)
    rows = sum(map(len, (*pieces, *own.loose)))
    if numbers != list(range(end - len(numbers), end)) or rows < stored.history_rows:
        raise UnreadableState("the stored detector state is damaged: a part of its history is missing")
    return replace(state, history=History(pieces, own.loose, stored.history_rows, own.total))


def _encoded(piece: Piece) -> bytes:
    widths = tuple(piece.row[name].itemsize for name in WHOLE)
    body = msgspec.msgpack.encode(_Piece(piece.smallest, widths, piece.all_fresh, piece.data))
    return zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "big") + body


def _decoded(data: bytes) -> Piece:
    body = data[_CHECKSUM_BYTES:]
    if zlib.crc32(body) != int.from_bytes(data[:_CHECKSUM_BYTES], "big"):
        raise UnreadableState("the stored detector state is damaged: a part of its history is")
    packed = msgspec.msgpack.decode(body, type=_Piece)
    return Piece(packed.smallest, row_of(packed.widths, packed.all_fresh), packed.data)
