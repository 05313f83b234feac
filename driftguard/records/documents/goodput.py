"""The watch over the goodput of a stream: what it keeps between two looks, and what an incident says of it.

Goodput is tokens per second of a request's decoding. Requests are compared in cells: one segment, one K, one
band of concurrency. See driftguard.cost.goodput.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal
from uuid import UUID

from driftguard.records.documents.cost import Interval

GoodputKind = Literal["slower", "speculation_loses"]
AcceptanceMove = Literal["none", "fell", "rose", "not_shown"]


@dataclass(frozen=True, slots=True)
class CellMean:
    """Of the requests of one cell. `weight`: requests; in a reference, blocks. `log_time`, `log_load`: means
    of the logarithms of the seconds per output token and of the concurrency."""

    segment: str
    k: int
    band: int
    weight: float
    log_time: float
    log_load: float

    @property
    def key(self) -> tuple[str, int, int]:
        """What makes the cell."""
        return self.segment, self.k, self.band


@dataclass(frozen=True, slots=True)
class Block:
    """Requests that followed each other. Times by the source's clock; `slower`: mean logarithm of the time
    per token against the reference, of the requests that can be compared."""

    first_seq: int
    last_seq: int
    first_at: float  # seconds since 1970 UTC
    last_at: float
    cells: tuple[CellMean, ...]
    slower: float | None = None


@dataclass(frozen=True, slots=True)
class Rivalry:
    """Speculation against none in one band of concurrency. `count`, `mean`, `squares`: of the logarithms by
    which requests without speculation were faster (Welford); `speculating_squares`: of the logarithms of the
    times with speculation around the means that these were held against, of `speculating` degrees of freedom;
    `sums`: of bets, one per stake; `moves`: by how many standard deviations those without speculation were
    faster in each block, oldest first; `since`: the block in which the evidence began."""

    band: int
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    sums: tuple[float, ...] = ()
    since_seq: int | None = None
    since_at: float | None = None
    speculating: int = 0
    speculating_squares: float = 0.0
    moves: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Watched:
    """An incident that the watch opened, or told of a further fall. `kind`: what it waits for to be over.
    `slower`: of the blocks that raised the newest alarm; `sums`: of bets that it is over, after `blocks`;
    `moves`: by how much the newest of these were slower; `quiet`: looks in a row at which speculation did not
    lose; `band`: in which it lost."""

    incident_id: UUID
    kind: GoodputKind
    slower: float = 0.0
    sums: tuple[float, ...] = ()
    quiet: int = 0
    band: int | None = None
    blocks: int = 0
    moves: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputWatch:
    """`seq`: of the newest record that was read. `spread`: `slower` of the blocks of the reference, oldest
    first. `pending`: newest blocks, which may belong to a fall and are not learned yet. `alarmed`: the
    evidence passed A, and an open fall of acceptance explains it."""

    seq: int = 0
    begun_at: datetime | None = None  # by the sidecar's clock; what an operator decided before is past
    reference: tuple[CellMean, ...] = ()
    spread: tuple[float, ...] = ()
    sums: tuple[float, ...] = ()
    pending: tuple[Block, ...] = ()
    rivalries: tuple[Rivalry, ...] = ()
    alarmed: bool = False
    opened: Watched | None = None


@dataclass(frozen=True, slots=True)
class FurtherFall:
    """Of goodput while its incident was open. `seq`, `at`: of its first request; `lost`: part of the tokens
    per second since then, against the time before the incident."""

    seq: int
    at: datetime
    lost: float
    concurrency: tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputChange:
    """What an incident of goodput is about.

    kind: "slower", tokens come slower at the same load; "speculation_loses", without speculation they would
    come faster at the load there is now. concurrency: the fewest and the most requests at once of the load at
    which most of its requests ran. lost: part of the tokens per second, by the watch. requests: after the
    change. acceptance: what it did meanwhile; "none": it did not move, as the interval of its change (99%)
    excludes a move that matters. by_acceptance: fewer tokens per step are most of it. false_alarm_days: of a
    steady stream, at least so many are expected to one false alarm. factor: speculation against none, of
    "speculation_loses". further: the newest further fall, while it lasts; `lost` is then that of it, where
    kind is "slower".
    """

    kind: GoodputKind
    concurrency: tuple[int, int] | None
    lost: float
    requests: int
    acceptance: AcceptanceMove
    false_alarm_days: float
    by_acceptance: bool = False
    factor: Interval | None = None
    further: FurtherFall | None = None
