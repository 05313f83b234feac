"""The goals of the engine on a GPU, and the measurements against them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tests.gpu.check.loop.judging import loop_reaches
from tests.gpu.check.reach import Reach
from tests.gpu.check.rows import Findings, PeerTime, VerifyTime
from tests.gpu.check.tables import NOT_YET

FLOOR_MULTIPLE = 1.5
FASTER = "faster than it"
SMALL_MICROSECONDS = 12.0


def reaches(found: Findings) -> list[Reach]:
    large, small = (
        [row for row in found.of(VerifyTime) if is_one(row.batch)] for is_one in (_is_large, _is_small)
    )
    peers = found.of(PeerTime)
    return [
        _at_most("verify, B >= 64, V = 128k", "times the floor", large, FLOOR_MULTIPLE, _over_floor),
        *_against_peers("verify, B >= 64", [row for row in peers if _is_large(row.batch)]),
        _at_most("verify, B <= 8", "microseconds, cold", small, SMALL_MICROSECONDS, _cold),
        *_against_peers("verify, B <= 8", [row for row in peers if _is_small(row.batch)]),
        *loop_reaches(found),
    ]


def _is_large(batch: int) -> bool:
    return batch >= 64


def _is_small(batch: int) -> bool:
    return batch <= 8


def _over_floor(row: VerifyTime) -> float:
    return row.over_floor


def _cold(row: VerifyTime) -> float:
    return row.cold


def _at_most(
    what: str, unit: str, rows: list[VerifyTime], most: float, value: Callable[[VerifyTime], float]
) -> Reach:
    reach = f"at most {most:g} {unit}"
    if not rows:
        return Reach(what, reach)
    worst = max(value(row) for row in rows)
    return Reach(what, reach, f"{_each(rows, value)}; the worst {worst:.2f}", worst <= most)


def _against_peers(what: str, rows: list[PeerTime]) -> Iterable[Reach]:
    """One reach for each peer: the least of its ratios decides."""
    for name in dict.fromkeys(row.name for row in rows):
        timed = [row for row in rows if row.name == name]
        ratios = [row.ratio for row in timed if row.ratio is not None]
        if ratios:
            measured = f"{min(ratios):.2f}x to {max(ratios):.2f}x"
            yield Reach(f"{what}, against {name}", FASTER, measured, min(ratios) > 1)
        else:
            yield Reach(f"{what}, against {name}", FASTER, f"{NOT_YET}: {timed[0].note}")


def _each(rows: list[VerifyTime], value: Callable[[VerifyTime], float]) -> str:
    return ", ".join(f"{value(row):.2f} (B {row.batch}, K {row.drafts})" for row in rows)
