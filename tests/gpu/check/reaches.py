"""What the engine is meant to reach on a GPU, and what was measured of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.gpu.check.benchmarks import Measured, VerifyTime

NOT_YET = "not yet measured"

FLOOR_MULTIPLE = 1.5
LARGE_SPEEDUP, SMALL_SPEEDUP = 5.0, 2.0
SMALL_MICROSECONDS = 12.0


@dataclass(frozen=True, slots=True)
class Reach:
    what: str
    reach: str
    measured: str = NOT_YET
    met: bool | None = None  # None: not measured, or not all of it

    @property
    def verdict(self) -> str:
        return {True: "met", False: "not met", None: NOT_YET}[self.met]


# Of the whole loop, which this command does not run.
LOOP = (
    Reach("decoding without speculation, B = 1, 7B-cost synthetic target, bf16", "at least 85% of bandwidth"),
    Reach("with speculation at acceptance .7 / .8 / .9", "at least 2.3x / 3x / 3.8x the own baseline"),
    Reach("with speculation, against transformers assisted generation", "at least 4x"),
    Reach("batch 1 to 64", "never slower than without speculation"),
    Reach("host synchronisations per step of the loop", "0"),
    Reach("verification on the CPU reference", "at most 10% of one target forward"),
)


def reaches(measured: Measured) -> list[Reach]:
    large = [row for row in measured.verify if row.batch >= 64]
    small = [row for row in measured.verify if row.batch <= 8]
    return [
        _at_most("verify, B >= 64, V = 128k", "times the floor", large, FLOOR_MULTIPLE, _over_floor),
        *_against_peers("verify, B >= 64", large, LARGE_SPEEDUP),
        _at_most("verify, B <= 8", "microseconds, cold", small, SMALL_MICROSECONDS, _cold),
        *_against_peers("verify, B <= 8", small, SMALL_SPEEDUP),
        *LOOP,
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
