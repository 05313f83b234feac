"""Derives a server's condition, and the windows to store, from two readings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from driftguard.adapters.adapter import Adapter
from driftguard.adapters.condition import RECORDED, Condition
from driftguard.adapters.reading import Reading
from driftguard.adapters.window import Identity, LeftOut, Window, condition_of


@dataclass(frozen=True, slots=True)
class Judged:
    """`windows`: those to store; the next one begins at this reading once they are."""

    condition: Condition
    detail: str
    windows: Sequence[Window] = ()


def judge(adapter: Adapter, before: Reading | None, reading: Reading, known: Identity) -> Judged:
    """`before`: the reading at which the last stored window ended; None if there is none. Raises
    Incomplete."""
    try:
        windows = adapter.windows(before or reading, reading, known)
    except LeftOut as reason:
        return Judged("reporting", f"a window was left out: {reason}")
    condition = condition_of(windows)
    if condition == "not_speculating":
        return Judged(condition, f"{adapter.name} answers, but does not speculate; {adapter.speculate}")
    if before is None:
        return Judged("waiting", "the next scrape or export gives its first window")
    stored = [window for window in windows if window.condition in RECORDED]
    return Judged(condition, _advice(condition, adapter, windows), stored)


def _advice(condition: Condition, adapter: Adapter, windows: Sequence[Window]) -> str:
    if condition == "drafting_stopped":
        tokens = sum(window.generated or 0 for window in windows)
        return f"{adapter.name} generated {tokens:,} tokens without a draft since the last window"
    return ""
