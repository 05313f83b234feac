"""The goals of the loop, and the measurements against them."""

from __future__ import annotations

from tests.gpu.check.reach import Reach
from tests.gpu.check.rows import (
    ADAPTIVE,
    TRANSFORMERS,
    BatchTime,
    Findings,
    PeerSpeed,
    PlainTime,
    SpeculativeTime,
    Synchronisations,
)
from tests.gpu.check.tables import NOT_YET

OF_BOUND = 0.85
SPEEDUPS = {0.7: 2.3, 0.8: 3.0, 0.9: 3.8}  # by stated acceptance
OVER_TRANSFORMERS = 4.0


def loop_reaches(found: Findings) -> list[Reach]:
    return [
        _plain(found),
        *(_speculation(found, acceptance) for acceptance in SPEEDUPS),
        *(_against_transformers(found, acceptance) for acceptance in SPEEDUPS),
        _batches(found),
        _synchronisations(found),
    ]


def _plain(found: Findings) -> Reach:
    what, reach = (
        "decoding without speculation, B = 1, 7B-cost synthetic target, bf16",
        f"at least {OF_BOUND:.0%} of bandwidth",
    )
    row = found.newest(PlainTime)
    if row is None:
        return Reach(what, reach)
    took, bound = row.served.milliseconds, row.bound_milliseconds
    told = f"{row.of_bound:.1%}: {took:.2f} ms, its bytes take {bound:.2f} ms"
    return Reach(what, reach, told, row.of_bound >= OF_BOUND)


def _speculation(found: Findings, acceptance: float) -> Reach:
    least = SPEEDUPS[acceptance]
    what, reach = f"with speculation, acceptance {acceptance:g}", f"at least {least:g}x the own baseline"
    row = found.best(acceptance)
    if row is None:
        return Reach(what, reach)
    return Reach(what, reach, f"{row.speedup:.2f}x, K = {row.drafts}{counted(row)}", row.speedup >= least)


def counted(row: SpeculativeTime) -> str:
    acceptance = row.served.acceptance
    return "" if acceptance is None else f", {acceptance:.3f} accepted"


def _against_transformers(found: Findings, acceptance: float) -> Reach:
    what = f"with speculation, acceptance {acceptance:g}, against {TRANSFORMERS}"
    reach = f"at least {OVER_TRANSFORMERS:g}x"
    own = found.best(acceptance)
    theirs = [
        row.tokens_per_second
        for row in found.of(PeerSpeed)
        if row.name == TRANSFORMERS and row.stated == acceptance and row.tokens_per_second is not None
    ]
    if own is None or not theirs:
        return Reach(what, reach)
    ratio = own.served.tokens_per_second / max(theirs)
    return Reach(what, reach, f"{ratio:.1f}x", ratio >= OVER_TRANSFORMERS)


def _batches(found: Findings) -> Reach:
    what, reach = "batch 1 to 64", "never slower than without speculation"
    every = found.of(BatchTime)
    rows = [row for row in every if row.drafts == ADAPTIVE] or every
    if not rows:
        return Reach(what, reach)
    told = ", ".join(f"{row.speedup:.2f}x (B {row.batch}, K {row.drafts})" for row in rows)
    if not {1, 64} <= {row.batch for row in rows}:
        return Reach(what, reach, f"{NOT_YET} throughout: {told}")
    return Reach(what, reach, told, all(row.speedup >= 1 for row in rows))


def _synchronisations(found: Findings) -> Reach:
    what, reach = "host synchronisations per step of the loop", "0"
    rows = found.of(Synchronisations)
    if not rows:
        return Reach(what, reach)
    if refused := [row.refused for row in rows if row.refused is not None]:
        return Reach(what, reach, refused[0], met=False)
    if uncounted := [row.uncounted for row in rows if row.uncounted is not None]:
        return Reach(what, reach, f"torch refused nothing, but calls are {NOT_YET}: {uncounted[0]}")
    told = "; ".join(f"{row.total / row.steps:g} ({row.what})" for row in rows)
    return Reach(what, reach, told, not any(row.total for row in rows))
