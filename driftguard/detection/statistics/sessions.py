"""Requests of one conversation are not independent: what its earlier requests say about the next one.

Sums over every open session (a session inside one stratum) are kept in a bounded table, the least
recently seen at its front. One that was dropped and comes back counts as a new session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Keys = NDArray[np.uint64]

OPEN_SESSIONS = 512  # per stream
NO_SESSION = 0
# Of a session: requests, sum of x, sum of log length, how many requests of the stream ago it began; of its
# newest, each of which counts REMEMBERED of the next one: their weight, and the weighted sum of x
KNOWN = 6
REMEMBERED = 11.0 / 12.0  # so the newest twelve, about


@dataclass(frozen=True, slots=True, eq=False)
class OpenSessions:
    """Q sessions, least recently seen first."""

    key: Keys  # [Q]
    sums: Floats  # [Q, KNOWN], with the stream's count of requests when it began

    @classmethod
    def empty(cls) -> OpenSessions:
        return cls(np.zeros(0, dtype=np.uint64), np.zeros((0, KNOWN)))

    def __len__(self) -> int:
        return len(self.key)


def with_newest(sums: Floats) -> Floats:
    """[Q, KNOWN], where states of before know the newest requests of no session: they were like all of it."""
    if sums.shape[1] == KNOWN:
        return sums
    requests, total = sums[:, 0], sums[:, 1]
    newest = (1.0 - REMEMBERED**requests) / (1.0 - REMEMBERED)
    return np.column_stack([sums, newest, newest * total / requests])


def session_keys(session: Sequence[str | None], stratum: Sequence[int]) -> Keys:
    """A 64-bit hash of each (session, stratum) that is the same in every process; NO_SESSION where none."""
    if not any(session):
        return np.zeros(len(session), dtype=np.uint64)
    known: dict[tuple[str | None, int], int] = {}
    keys = []
    for pair in zip(session, stratum, strict=True):
        key = known.get(pair)
        if key is None:
            key = known[pair] = NO_SESSION if not pair[0] else _hash(pair[0], pair[1])
        keys.append(key)
    return np.array(keys, dtype=np.uint64)


def _hash(session: str, stratum: int) -> int:
    text = f"{stratum} {session}".encode(errors="surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") or 1


def sums_before(
    table: OpenSessions, keys: Keys, x: Floats, line: Floats, clock: int
) -> tuple[Floats, OpenSessions]:
    """Each request's session as it was before it [T, KNOWN], and the table after all of them.

    `clock` counts the stream's drafted requests up to the first of these.
    """
    if not keys.any():
        return np.zeros((len(keys), KNOWN)), table
    resting = _places(table, keys)  # of sessions of this batch that were open before it
    seen: dict[int, list[float]] = {}  # of this batch, least recently seen first
    moved: dict[int, int] = {}  # from the table to `seen`: their places
    opened, least_recent, dropped = len(table), iter(table.key.tolist()), 0
    before = []
    for now, key, value, length in zip(count(clock), keys.tolist(), x.tolist(), line.tolist()):
        if key == NO_SESSION:
            before.append([0.0] * KNOWN)
            continue
        if key in seen:
            sums = seen.pop(key)
        elif key in resting:
            moved[key] = resting.pop(key)
            sums = table.sums[moved[key]].tolist()
        else:
            sums = [0.0, 0.0, 0.0, float(now), 0.0, 0.0]
            opened += 1
        requests, total, lengths, began, newest, of_newest = sums
        before.append([requests, total, lengths, now - began, newest, of_newest])
        newest, of_newest = REMEMBERED * newest + 1.0, REMEMBERED * of_newest + value
        seen[key] = [requests + 1.0, total + value, lengths + length, began, newest, of_newest]
        if opened > OPEN_SESSIONS:
            opened -= 1
            for oldest in least_recent:
                dropped += 1
                if oldest not in moved:
                    resting.pop(oldest, None)
                    break
            else:
                del seen[next(iter(seen))]
    rest = np.arange(len(table)) >= dropped
    rest[list(moved.values())] = False
    after = OpenSessions(
        np.concatenate([table.key[rest], np.array(list(seen), dtype=np.uint64)]),
        np.concatenate([table.sums[rest], np.array(list(seen.values())).reshape(-1, KNOWN)]),
    )
    return np.array(before), after


def _places(table: OpenSessions, keys: Keys) -> dict[int, int]:
    """In the table, of those of the keys that are in it."""
    wanted = np.unique(keys)
    nearest = wanted[np.minimum(np.searchsorted(wanted, table.key), len(wanted) - 1)]
    places = np.flatnonzero(nearest == table.key)
    return dict(zip(table.key[places].tolist(), places.tolist(), strict=True))
