"""A detector's state as bytes: versioned, checked, and the same bytes for the same state.

Layout: magic, version (1 byte), CRC-32 of the rest (4 bytes, big endian), then MessagePack of `_State`.
Whole numbers of the history are stored in the narrowest type that holds them.

It is stored in parts, so that most of it is written once. The head changes with every request: the state
with its loose history only (`history.py`). A compact piece never changes; it is needed until all of it has
fallen out of the history.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from driftguard.detection.state.history import COMPACT_ROWS, FLOATS, WHOLE, History, Piece, row_of
from driftguard.detection.state.stream_state import ALONE, GROWN, UNTOLD, OpenIncident, StreamState
from driftguard.detection.statistics.factors import NOT_BEGUN, Profile, seen_of
from driftguard.detection.statistics.sessions import OpenSessions, with_newest
from driftguard.detection.statistics.turns import KEPT, OF_TURNS, with_wandering
from driftguard.errors import DriftGuardError

MAGIC = b"DGSTATE"
VERSION = 11  # of the format, and of the bets (`bets.py`) whose sums and cut-offs a state holds
_HEADER_BYTES = len(MAGIC) + 1 + 4
_WIDTHS = ("<u1", "<u2", "<u4", "<i8")


class UnreadableState(DriftGuardError):
    """The stored detector state cannot be read: {reason}."""

    title = "Unreadable detector state"


class OtherVersion(UnreadableState):
    """The stored detector state is whole, and of another version of DriftGuard."""

    title = "Detector state of another version"


class _Array(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Narrow(msgspec.Struct, array_like=True):
    """Whole numbers as their smallest and what each lies above it, in the narrowest type."""

    smallest: int
    above: _Array


class _Steps(msgspec.Struct, array_like=True):
    """Whole numbers as the first (null: there are none) and the differences from one to the next."""

    first: int | None
    differences: _Narrow


class _History(msgspec.Struct, array_like=True):
    ordinal: _Steps
    ended_ms: _Steps
    drafted: _Narrow
    accepted: _Narrow
    stratum: _Narrow
    expected: _Array
    margin: _Array
    fresh: _Array


class _Profile(msgspec.Struct, array_like=True):
    number: int
    strays: int
    current: _Array
    totals: _Array
    cycles: _Array
    reference: _Array
    used: _Array
    effect: _Array
    variance: _Array
    moved: _Array | None = None  # not in states of before
    seen: _Array | None = None  # nor these two
    aside: _Array | None = None


class _Sessions(msgspec.Struct, array_like=True):
    key: _Array
    sums: _Array


class _Incident(msgspec.Struct, array_like=True):
    opened_ordinal: int
    change_point: int
    change_point_ms: int
    evidence_since: int
    earliest: int
    told_gradual: int
    next_look: int
    segments: _Array
    evidence: _Array
    alarm_ordinal: _Array
    halfway: _Array
    test: _Array
    wealth: _Array
    seen: _Array
    last_seen: _Array
    outcome: _Array
    told: _Array | None = None  # not in states of before
    began: _Array | None = None  # nor this
    # Nor this: each test was of one segment, or of all together, and `halfway` was of segments.
    common: _Array | None = None


class _State(msgspec.Struct, array_like=True):
    ordinal: int
    requests: int
    undrafted: int
    undrafted_in_a_row: int
    first_ended_at: float
    last_ended_at: float
    requests_per_day: float
    steady_since: float
    k_newest: int
    k_changes: int
    names: tuple[str, ...]
    segment_of_stratum: _Array
    setting_of_stratum: _Array
    drafted_requests: _Array
    reference: _Array
    reference_size: _Array
    reference_since: _Array
    learning: _Array
    bins: _Array
    ready_ordinal: _Array
    joining: _Array
    growing: _Array
    stratum_evidence: _Array
    stratum_mean_start: _Array
    cut_off: _Array
    stream_evidence: _Array
    stream_mean_start: _Array
    begun: _Array
    evidence_since: tuple[int, int]
    next_alarm: tuple[int, int]
    incidents: tuple[_Incident | None, _Incident | None]
    accepted_anew: _Array
    windows: _Array
    last_window_ended_at: float
    windows_after_gap: int
    running_requests: int
    started_requests: int
    blocks: _Array
    counted: _Array
    counted_until: _Array
    inflation: _Array
    measured_at: _Array
    recoveries: _Array
    next_measured: int
    profiles: tuple[_Profile, ...]
    sessions: _Sessions
    in_session: int
    history: _History
    # Not in states of before:
    day_begun: tuple[int, int, int] = (NOT_BEGUN, 0, 0)
    past_changes: _Array = msgspec.field(default_factory=lambda: _array(np.zeros((0, 3), dtype=np.int64)))
    turns: _Array | None = None  # nor where there are none
    onsets: _Array | None = None


_decode_wire = msgspec.msgpack.Decoder(_State).decode


def encode_state(state: StreamState) -> bytes:
    wire = {item.name: _pack(getattr(state, item.name)) for item in fields(state)}
    wire["turns"] = wire["turns"] if state.turns.any() else None
    body = msgspec.msgpack.encode(_State(**wire))
    return MAGIC + bytes([VERSION]) + zlib.crc32(body).to_bytes(4, "big") + body


def decode_state(data: bytes) -> StreamState:
    """Raises OtherVersion, or else UnreadableState."""
    if data[: len(MAGIC)] != MAGIC or len(data) < _HEADER_BYTES:
        raise UnreadableState("the stored detector state is not one: its first bytes are wrong")
    body = data[_HEADER_BYTES:]
    if zlib.crc32(body) != int.from_bytes(data[len(MAGIC) + 1 : _HEADER_BYTES], "big"):
        raise UnreadableState("the stored detector state is damaged: its checksum does not fit")
    version = data[len(MAGIC)]
    if version != VERSION:
        raise OtherVersion(
            f"the stored detector state has version {version}, this program reads version {VERSION}"
        )
    try:
        wire = _decode_wire(body)
        columns = {name: _unpack(getattr(wire, name)) for name in wire.__struct_fields__ if name != "history"}
        _begin_anew_where_lost(columns)
        _with_turns(columns)
        if columns["onsets"] is None:
            columns["onsets"] = np.zeros((len(columns["ready_ordinal"]), 2), dtype=np.int64)
        total = int(columns["drafted_requests"].sum())
        return StreamState(**columns, history=_history(wire.history, total))
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise UnreadableState(f"the stored detector state is damaged: {error}") from None


def _begin_anew_where_lost(columns: dict[str, Any]) -> None:
    """In states of release 0.1.0 evidence that had grown beyond all numbers has lost its age, for good."""
    for of in ("stratum", "stream"):
        known = np.isfinite(columns[f"{of}_mean_start"])
        for name in (f"{of}_mean_start", f"{of}_evidence"):
            columns[name] = np.where(known, columns[name], 0.0)


def _with_turns(columns: dict[str, Any]) -> None:
    """Nothing is known of turns where no request named its session, nor in states of before."""
    joining = columns["joining"]
    missing = GROWN - joining.shape[2]
    columns["joining"] = np.concatenate([joining, np.zeros((*joining.shape[:2], missing))], axis=2)
    if columns["turns"] is None:
        columns["turns"] = np.zeros((len(columns["ready_ordinal"]), KEPT, OF_TURNS))
    elif columns["turns"].shape[2] < OF_TURNS:
        columns["turns"] = with_wandering(columns["turns"])


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, History):
        return _History(
            _steps(value.wide("ordinal")),
            _steps(value.wide("ended_ms")),
            _narrow(value.wide("drafted")),
            _narrow(value.wide("accepted")),
            _narrow(value.wide("stratum")),
            *(_array(value.wide(name).astype(width)) for name, width in FLOATS.items()),
        )
    if isinstance(value, OpenSessions):
        return _Sessions(_array(value.key), _array(value.sums))
    if isinstance(value, OpenIncident):
        return _Incident(**{item.name: _pack(getattr(value, item.name)) for item in fields(value)})
    if isinstance(value, Profile):
        return _Profile(**{item.name: _pack(getattr(value, item.name)) for item in fields(value)})
    if isinstance(value, tuple):
        return tuple(_pack(item) for item in value)
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, _Array):
        return _unarray(value)
    if isinstance(value, _Sessions):
        return OpenSessions(_unarray(value.key), with_newest(_unarray(value.sums)))
    if isinstance(value, _Incident):
        columns = {item.name: _unpack(getattr(value, item.name)) for item in fields(OpenIncident)}
        if value.told is None:
            columns["told"] = np.tile(UNTOLD, (len(columns["seen"]), 1))
        if value.began is None:
            columns["began"] = np.full(len(columns["segments"]), value.change_point)
        if value.common is None:
            columns["common"] = np.full(len(columns["segments"]), ALONE)
            columns["halfway"] = columns["halfway"][np.unique(columns["test"], return_index=True)[1]]
        return OpenIncident(**columns)
    if isinstance(value, _Profile):
        columns = {item.name: _unpack(getattr(value, item.name)) for item in fields(Profile)}
        if value.moved is None:
            columns["moved"] = np.zeros_like(columns["used"])
        if value.seen is None:
            columns["seen"] = seen_of(columns["totals"])
        if value.aside is None:
            columns["aside"] = np.zeros_like(columns["current"])
        return Profile(**columns)
    if isinstance(value, tuple):
        return tuple(_unpack(item) for item in value)
    return value


def _history(packed: _History, total: int) -> History:
    """The newest of `total` observations."""
    columns = {
        "ordinal": _unsteps(packed.ordinal),
        "ended_ms": _unsteps(packed.ended_ms),
        "drafted": _unnarrow(packed.drafted),
        "accepted": _unnarrow(packed.accepted),
        "stratum": _unnarrow(packed.stratum),
        **{name: _unarray(getattr(packed, name)) for name in FLOATS},
    }
    return History.of(columns, total)


def _array(values: NDArray[Any]) -> _Array:
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return _Array(little.dtype.str, values.shape, np.ascontiguousarray(little).tobytes())


def _unarray(packed: _Array) -> NDArray[Any]:
    stored = np.frombuffer(packed.data, dtype=np.dtype(packed.dtype)).reshape(packed.shape)
    return stored.astype(stored.dtype.newbyteorder("="))


def _narrow(values: NDArray[np.int64]) -> _Narrow:
    smallest = int(values.min()) if len(values) else 0
    above = values - smallest
    largest = int(above.max()) if len(values) else 0
    return _Narrow(
        smallest, _array(above.astype(next(kind for kind in _WIDTHS if largest <= np.iinfo(kind).max)))
    )


def _unnarrow(packed: _Narrow) -> NDArray[np.int64]:
    return _unarray(packed.above).astype(np.int64) + packed.smallest


def _steps(values: NDArray[np.int64]) -> _Steps:
    return _Steps(int(values[0]) if len(values) else None, _narrow(np.diff(values)))


def _unsteps(packed: _Steps) -> NDArray[np.int64]:
    if packed.first is None:
        return np.zeros(0, dtype=np.int64)
    return np.cumsum(
        np.concatenate([np.array([packed.first], dtype=np.int64), _unnarrow(packed.differences)])
    )


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


_decode_piece = msgspec.msgpack.Decoder(_Piece).decode


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
    packed = _decode_piece(body)
    return Piece(packed.smallest, row_of(packed.widths, packed.all_fresh), packed.data)
