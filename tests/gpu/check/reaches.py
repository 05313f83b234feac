"""The goals of the engine on a GPU, and the measurements against them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tests.gpu.check.benchmarks import Measured, VerifyTime
from tests.gpu.check.loop.judging import loop_reaches
from tests.gpu.check.reach import Reach
from tests.gpu.check.tables import NOT_YET

FLOOR_MULTIPLE = 1.5
LARGE_SPEEDUP, SMALL_SPEEDUP = 5.0, 2.0
SMALL_MICROSECONDS = 12.0


def reaches(measured: Measured) -> list[Reach]:
    large = [row for row in measured.verify if row.batch >= 64]
    small = [row for row in measured.verify if row.batch <= 8]
    return [
        _at_most("verify, B >= 64, V = 128k", "times the floor", large, FLOOR_MULTIPLE, _over_floor),
        *_against_peers("verify, B >= 64", large, LARGE_SPEEDUP),
        _at_most("verify, B <= 8", "microseconds, cold", small, SMALL_MICROSECONDS, _cold),
        *_against_peers("verify, B <= 8", small, SMALL_SPEEDUP),
        *loop_reaches(measured.loop),
    ]


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


def _against_peers(what: str, rows: list[VerifyTime], least: float) -> Iterable[Reach]:
    """One reach for each peer: the least of its ratios decides."""
    for name in dict.fromkeys(peer.name for row in rows for peer in row.peers):
        ratios, notes = [], []
        for row in rows:
            (peer,) = (peer for peer in row.peers if peer.name == name)
            if peer.microseconds is None:
                notes.append(peer.note)
            else:
                ratios.append(peer.microseconds / row.cold)
        reach = f"at least {least:g}x faster"
        if ratios:
            measured = f"{min(ratios):.1f}x to {max(ratios):.1f}x"
            yield Reach(f"{what}, against {name}", reach, measured, min(ratios) >= least)
        else:
            yield Reach(f"{what}, against {name}", reach, f"{NOT_YET}: {notes[0]}")


def _each(rows: list[VerifyTime], value: Callable[[VerifyTime], float]) -> str:
    return ", ".join(f"{value(row):.2f} (B {row.batch}, K {row.drafts})" for row in rows)
