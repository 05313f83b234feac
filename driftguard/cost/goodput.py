"""Has goodput fallen at the same load, and does speculation lose at the load there is now? Pure.

Two sequential tests over blocks of requests: repeated looks add no false alarms. A block is at least
BLOCK_REQUESTS timed requests with drafts over at least BLOCK_SECONDS: requests that run at the same time
share the machine's moods, so blocks and not requests are the units. Times count by their logarithm, so that
heavy tails do not outweigh everything else.

**Slower.** Like is compared with like, in cells c (segment, K, band of concurrency) that have been seen
before. With n_c requests of a block in cell c, l the mean logarithm of the seconds per token and x that of
the concurrency,

    d = sum over c of n_c (l_c - m_c - max(x_c - y_c, 0)) / sum of n_c

m_c, y_c: the same of the reference, all blocks but the newest HELD (a block counts at most once, for about
REMEMBERED of them). A band holds loads up to twice as high: a fuller server may take longer in proportion to
its requests, and that is no fall. Blocks vary by s, in the long run: s^2 = max over B of B var(means of B
blocks that follow each other), so that moods that outlast a block are spread, and no evidence. The bet

    e = 1 + stake min(max((d - margin) / s, -1), REACH)
    margin = log(1 / (1 - LEAST_LOST)) + s max(.3, 2 / sqrt(n))

is worth at most 1 on average while goodput is down by less than LEAST_LOST: cutting off below -1 adds .14 s
to the mean of a normal block, which the margin's .3 s outweigh, cutting off above only takes, and
2 s / sqrt(n) is two standard errors of a reference of n blocks. Sums of bets R <- (1 + R) e then make
R_t - t a supermartingale
(Shin, Ramdas, Rinaldo 2023; driftguard.detection.statistics.bets): the first R >= A comes after A blocks or
more in expectation, whenever and however often one looks.

**Speculation loses.** In each band, requests without speculation are held against those with it in the same
block and segment. With n_c and m_c of them in segment c, y_c the difference of the mean logarithms of their
times, positive where those without are faster, v_0 and v_1 the variances of one such logarithm,

    w_c = 1 / (v_0 / n_c + v_1 / m_c),  z = sum of w_c (y_c - log(1 / (1 - LEAST_GAIN))) / sqrt(sum of w_c)

so that few requests on either side tell as little as they do. The null is
E[y_c] <= log(1 / (1 - LEAST_GAIN)); then bets on z / s are worth at most 1 on average, whatever the
distribution, if its variance is 1 at most (`block_bets.bet_of_unit_variance`). v_0 and v_1 are those of the
blocks before, and more by two standard errors. s^2 >= 1 is the variance of z in the long run, as above:
bursts and tasks that come together make it larger than single requests do. Assumption: both run at the same
loads of the band, as where the ones without speculation are drawn at random.

**Over.** Whether an open fall is made good: `goodput_end.py`.

**Further.** While a fall of size D is open, the same bets ask whether d lies beyond D + margin: the null is
then that goodput is down by less than LEAST_LOST beyond what was told.

Both share one budget of false alarms: half of it for "slower", 1 / BANDS of the other half for each band. A
mean of such sums, weighted so, is one again. `alarm_level` is A for a number of days: blocks are no shorter
than BLOCK_SECONDS.

Assumptions: blocks depend on each other for no longer than s shows, and the reference holds what is usual. A
daily rhythm at the same load is spread only once it was seen. Measured: tests/benchmarks/bench_goodput.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from driftguard import alpha_spending
from driftguard.cost.block_bets import NONE, bet, bet_of_unit_variance, evidence_of
from driftguard.cost.goodput_end import KEPT, is_made_good
from driftguard.cost.times import (
    LONGEST,
    SHORTEST,
    UNKNOWN_BAND,
    TimedRequest,
    band_of,
    concurrency_of,
    k_of,
    measured,
)
from driftguard.records.documents.goodput import Block, CellMean, GoodputWatch, Rivalry, Watched

BLOCK_SECONDS: Final = 300.0
BLOCK_REQUESTS: Final = 20
JUDGED_REQUESTS: Final = 10  # of a block, in known cells
KNOWN: Final = 5.0  # blocks from which on a cell is compared
REMEMBERED: Final = 864.0  # blocks, three days without a pause
READY: Final = 36  # blocks of the reference, before which nothing is judged
SPREAD_OF: Final = 288
LEAST_SPREAD: Final = 0.03
LONGEST_BATCH: Final = 16  # blocks
BATCHES: Final = 6
LEAST_LOST: Final = 0.10
SUSPECT: Final = 20.0  # evidence from which on no block is learned
HELD: Final = 6  # newest blocks that are not learned yet: a fall may have begun in them
NEWEST: Final = 3  # blocks that say how slow it is now,
LATEST: Final = 2  # and whether it still is
MOST_PENDING: Final = 100
MOST_CELLS: Final = 1_000
BANDS: Final = 16
LEAST_GAIN: Final = 0.02
RIVALS: Final = 20  # requests with and without speculation in a band, before which nothing is judged
QUIET_LOOKS: Final = 3


class Numbered(NamedTuple):
    """`seq`: of the record."""

    seq: int
    request: TimedRequest


@dataclass(frozen=True, slots=True)
class Fall:
    """Blocks that raised an alarm. `slower`: mean of the logarithm of the time per token, against before."""

    blocks: tuple[Block, ...]
    slower: float

    @property
    def is_back(self) -> bool:
        """Whether the latest blocks are less than half as much slower."""
        latest = [block.slower for block in self.blocks if block.slower is not None][-LATEST:]
        return sum(latest) < self.slower / 2.0 * len(latest)

    @property
    def concurrency(self) -> tuple[int, int] | None:
        """Of the load at which most of the requests ran."""
        counts: dict[int, float] = defaultdict(float)
        for block in self.blocks:
            for cell in block.cells:
                counts[cell.band] += cell.weight
        return concurrency_of(max(counts, key=counts.__getitem__))

    @property
    def lost(self) -> float:
        """Part of the tokens per second."""
        return -math.expm1(-self.slower)


def alarm_level(false_alarm_days: float) -> float:
    """A: blocks to a false alarm, both tests together."""
    return false_alarm_days * 86_400.0 / BLOCK_SECONDS


def fold(watch: GoodputWatch, read: Sequence[Numbered]) -> GoodputWatch:
    """The watch after these requests, those without speculation among them, in order of their seq. The last
    of them, which make no block yet, are to be read again: `seq` stays before them."""
    for rows in _blocks(read):
        watch = _fold_block(watch, rows)
    return watch


def fall_of(watch: GoodputWatch, level: float) -> Fall | None:
    """What the evidence says is slower, from the block on that parts the newest ones best; while something is
    open, what is slower than that. `level`: A."""
    told = [block for block in watch.pending if block.slower is not None]
    if evidence_of(watch.sums) < 2.0 * level or not told:
        return None
    known = known_slower(watch)
    moves = np.array([block.slower for block in told]) - known
    above = np.cumsum((moves - moves[-NEWEST:].mean() / 2.0)[::-1])[::-1]
    first = int(above.argmax())
    return Fall(tuple(told[first:]), known + float(moves[first:].mean()))


def known_slower(watch: GoodputWatch) -> float:
    """By how much tokens are known to come slower: what is open says it."""
    return watch.opened.slower if watch.opened is not None else 0.0


def losing_in(watch: GoodputWatch, level: float, concurrency: tuple[int, int] | None) -> Rivalry | None:
    """The evidence that speculation loses at this load, if it is enough."""
    if watch.opened is not None:
        return None
    for rivalry in watch.rivalries:
        evidence = evidence_of(_sure_sums(rivalry))
        if concurrency_of(rivalry.band) == concurrency and evidence >= 2.0 * BANDS * level:
            return rivalry
    return None


def is_over(watch: GoodputWatch) -> bool:
    """Whether the open fall is made good by more than half."""
    spread = spread_of(watch.spread)
    return (
        watch.opened is not None and spread is not None and is_made_good(watch.opened, watch.spread, spread)
    )


def is_gone(watch: GoodputWatch) -> bool:
    """Whether nothing that can be compared has been served for long since the fall."""
    return watch.opened is not None and watch.opened.kind == "slower" and watch.opened.quiet >= READY


def with_opened(watch: GoodputWatch, opened: Watched) -> GoodputWatch:
    """The blocks of a fall are not learned. Also after a further fall, with what it is by then. The newest
    ones tell how slow it was before its end, which may come at once."""
    moves = [block.slower for block in watch.pending if block.slower is not None][-HELD:]
    fast = [place for place, move in enumerate(moves) if move < opened.slower / 2.0]
    opened = replace(opened, moves=tuple(moves[fast[-1] + 1 :] if fast else moves))
    return replace(watch, sums=NONE, pending=(), alarmed=False, opened=opened)


def closed(watch: GoodputWatch) -> GoodputWatch:
    """After the end of what was open, or of an alarm that is no incident of its own; the reference stays."""
    rivals = tuple(replace(item, sums=NONE, since_seq=None, since_at=None) for item in watch.rivalries)
    return replace(watch, sums=NONE, pending=(), rivalries=rivals, alarmed=False, opened=None)


def _blocks(read: Sequence[Numbered]) -> Iterator[list[Numbered]]:
    rows: list[Numbered] = []
    speculating, first, last = 0, math.inf, -math.inf
    for item in read:
        rows.append(item)
        if not _is_comparable(item.request) or k_of(item.request) == 0:
            continue
        speculating += 1
        first, last = min(first, item.request.ended_at), max(last, item.request.ended_at)
        if speculating >= BLOCK_REQUESTS and last - first >= BLOCK_SECONDS:
            yield rows
            rows = []
            speculating, first, last = 0, math.inf, -math.inf


def _is_comparable(request: TimedRequest) -> bool:
    """Where the load is not told, more of it looks like a slower machine."""
    seconds = request.time_per_output_token_seconds
    return (
        seconds is not None
        and SHORTEST <= seconds <= LONGEST
        and band_of(request.concurrency) != UNKNOWN_BAND
        and request.steps > 0
    )


def _fold_block(watch: GoodputWatch, rows: Sequence[Numbered]) -> GoodputWatch:
    comparable = [item for item in rows if _is_comparable(item.request)]
    told = measured([item.request for item in comparable])
    block = Block(
        first_seq=comparable[0].seq,
        last_seq=rows[-1].seq,
        first_at=min(item.request.ended_at for item in comparable),
        last_at=max(item.request.ended_at for item in comparable),
        cells=_cells([request for request in told if k_of(request) > 0]),
    )
    block = replace(block, slower=_slower(watch.reference, block))
    watch = replace(watch, seq=block.last_seq, rivalries=_rivals(watch, block, told))
    spread = spread_of(watch.spread)
    if spread is not None and block.slower is not None:
        beyond = block.slower - known_slower(watch) - _margin(watch, spread)
        watch = replace(watch, sums=bet(watch.sums, beyond / spread))
    if watch.opened is not None and watch.opened.kind == "slower":
        return _look_for_the_end(watch, watch.opened, block, spread)
    if spread is None or block.slower is None:
        return _hold(watch, block)
    if evidence_of(watch.sums) >= SUSPECT:
        return replace(watch, pending=(*watch.pending, block)[-MOST_PENDING:])
    if watch.alarmed:  # what an incident of acceptance explained is over: it was not usual
        return replace(watch, pending=(block,), alarmed=False)
    return _hold(watch, block)


def _hold(watch: GoodputWatch, block: Block) -> GoodputWatch:
    """Learns the blocks before the newest ones."""
    held = (*watch.pending, block)
    return _learn(replace(watch, pending=held[-HELD:]), held[:-HELD])


def _cells(requests: Sequence[TimedRequest]) -> tuple[CellMean, ...]:
    groups: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
    for item in requests:
        groups[item.segment, k_of(item), band_of(item.concurrency)].append((log_time(item), _log_load(item)))
    found = []
    for (segment, k, band), pairs in groups.items():
        time, load = np.mean(pairs, axis=0).tolist()
        found.append(CellMean(segment, k, band, float(len(pairs)), time, load))
    return tuple(found)


def log_time(request: TimedRequest) -> float:
    """Of a request whose time is known."""
    return math.log(request.time_per_output_token_seconds or math.nan)


def _log_load(request: TimedRequest) -> float:
    return math.log(max(request.concurrency or 1, 1))


def _slower(reference: Sequence[CellMean], block: Block) -> float | None:
    """None where too few requests have their like in the reference."""
    known = {cell.key: cell for cell in reference if cell.weight >= KNOWN}
    pairs = [(cell, like) for cell in block.cells if (like := known.get(cell.key)) is not None]
    requests = sum(cell.weight for cell, _ in pairs)
    if requests < JUDGED_REQUESTS:
        return None
    moves = [
        cell.weight * (cell.log_time - like.log_time - max(cell.log_load - like.log_load, 0.0))
        for cell, like in pairs
    ]
    return sum(moves) / requests


def spread_of(past: Sequence[float]) -> float | None:
    """s: of blocks in the long run; None where they are too few."""
    if len(past) < READY:
        return None
    values = np.array(past)
    found, size = LEAST_SPREAD**2, 1
    while size <= LONGEST_BATCH and len(values) >= BATCHES * size:
        count = len(values) // size
        means = values[len(values) - count * size :].reshape(count, size).mean(axis=1)
        found = max(found, size * float(means.var(ddof=1)))
        size *= 2
    return math.sqrt(found)


def _margin(watch: GoodputWatch, spread: float) -> float:
    return -math.log1p(-LEAST_LOST) + spread * max(0.3, 2.0 / math.sqrt(len(watch.spread)))


def _learn(watch: GoodputWatch, blocks: Sequence[Block]) -> GoodputWatch:
    known = {cell.key: cell for cell in watch.reference}
    for block in blocks:
        for cell in block.cells:
            known[cell.key] = _mixed(known.get(cell.key), cell)
    kept = sorted(known.values(), key=lambda cell: -cell.weight)[:MOST_CELLS]
    moves = [block.slower for block in blocks if block.slower is not None]
    return replace(watch, reference=tuple(kept), spread=(*watch.spread, *moves)[-SPREAD_OF:])


def _mixed(known: CellMean | None, cell: CellMean) -> CellMean:
    """A block counts for as much as its requests tell, at most once."""
    weight = min(cell.weight / BLOCK_REQUESTS, 1.0)
    if known is None:
        return replace(cell, weight=weight)
    share = weight / (known.weight + weight)
    return replace(
        known,
        weight=min(known.weight + weight, REMEMBERED),
        log_time=known.log_time + share * (cell.log_time - known.log_time),
        log_load=known.log_load + share * (cell.log_load - known.log_load),
    )


def _look_for_the_end(
    watch: GoodputWatch, opened: Watched, block: Block, spread: float | None
) -> GoodputWatch:
    """Bets that goodput is back by more than half. Cells that were not known before are learned."""
    known = {cell.key for cell in watch.reference if cell.weight >= KNOWN}
    new = tuple(cell for cell in block.cells if cell.key not in known)
    watch = _learn(watch, [replace(block, cells=new, slower=None)])
    watch = replace(watch, pending=(*watch.pending, block)[-MOST_PENDING:])
    if spread is None:
        return watch
    if block.slower is None:
        return replace(watch, opened=replace(opened, quiet=opened.quiet + 1))
    begun = alpha_spending.share(opened.blocks)
    sums = bet(opened.sums, (opened.slower / 2.0 - block.slower) / spread, begun)
    moves = (*opened.moves, block.slower)[-KEPT:]
    return replace(watch, opened=replace(opened, sums=sums, moves=moves, quiet=0, blocks=opened.blocks + 1))


class _Rivals(NamedTuple):
    """Logarithms of the times of a segment's requests at the same load, in one block."""

    speculating: list[float]
    without: list[float]

    @property
    def moves(self) -> list[float]:
        """By how much each without speculation was faster than those with it."""
        mean = sum(self.speculating) / len(self.speculating)
        return [mean - time for time in self.without]


def _rivals(watch: GoodputWatch, block: Block, told: Sequence[TimedRequest]) -> tuple[Rivalry, ...]:
    """Each band's requests without speculation against those with it, in this block."""
    cells: dict[tuple[str, int], _Rivals] = defaultdict(lambda: _Rivals([], []))
    for request in told:
        cell = cells[request.segment, band_of(request.concurrency)]
        (cell.speculating if k_of(request) > 0 else cell.without).append(log_time(request))
    found: dict[int, list[_Rivals]] = defaultdict(list)
    for (_, band), cell in cells.items():
        if cell.speculating and cell.without and band < BANDS:
            found[band].append(cell)
    known = {item.band: item for item in watch.rivalries}
    for band, rivals in found.items():
        known[band] = _rival(known.get(band, Rivalry(band)), rivals, block)
    return tuple(sorted(known.values(), key=lambda item: item.band))


def _rival(rivalry: Rivalry, cells: Sequence[_Rivals], block: Block) -> Rivalry:
    sums, past = _sure_sums(rivalry), rivalry.moves
    if min(rivalry.count, rivalry.speculating) >= RIVALS:
        z = _faster(rivalry, cells)
        sums = bet_of_unit_variance(sums, z / max(spread_of(past[:-HELD]) or 1.0, 1.0))
        if evidence_of(sums) < SUSPECT:
            past = (*past, z)[-SPREAD_OF:]
    count, mean, squares = rivalry.count, rivalry.mean, rivalry.squares
    freedom, speculating = rivalry.speculating, rivalry.speculating_squares
    for cell in cells:
        for move in cell.moves:
            count += 1
            apart = move - mean
            mean += apart / count
            squares += apart * (move - mean)
        freedom += len(cell.speculating) - 1
        speculating += float(np.var(cell.speculating)) * len(cell.speculating)
    found = replace(
        rivalry,
        count=count,
        mean=mean,
        squares=squares,
        speculating=freedom,
        speculating_squares=speculating,
        sums=sums,
        moves=past,
    )
    if evidence_of(sums) < SUSPECT:
        return replace(found, since_seq=None, since_at=None)
    if rivalry.since_seq is None:
        return replace(found, since_seq=block.first_seq, since_at=block.first_at)
    return found


def _sure_sums(rivalry: Rivalry) -> tuple[float, ...]:
    """None of an older version, which took the mean time of those with speculation for known."""
    return rivalry.sums if rivalry.sums and rivalry.speculating else NONE


def _faster(rivalry: Rivalry, cells: Sequence[_Rivals]) -> float:
    """z: by how many standard deviations those without speculation are faster than the null allows."""
    without = _variance(rivalry.squares, rivalry.count - 1)
    speculating = _variance(rivalry.speculating_squares, rivalry.speculating)
    margin = -math.log1p(-LEAST_GAIN)
    told = total = 0.0
    for cell in cells:
        weight = 1.0 / (without / len(cell.without) + speculating / len(cell.speculating))
        told += weight * (sum(cell.moves) / len(cell.without) - margin)
        total += weight
    return told / math.sqrt(total)


def _variance(squares: float, freedom: int) -> float:
    """Of single requests, and more by two standard errors of it, as tails are heavy."""
    return max(squares / freedom * (1.0 + 2.0 / math.sqrt(freedom)), LEAST_SPREAD**2)
