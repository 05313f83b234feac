"""Derives a server's condition, and the windows to store, from two readings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from driftguard.adapters.adapter import Adapter
from driftguard.adapters.condition import RECORDED, Condition
from driftguard.adapters.reading import Reading, Unfinished
from driftguard.adapters.window import Drafted, Identity, LeftOut, Window, condition_of

# Whether canary probes were asked of a server, by its name and its address, at any time between. Counters
# hold the tokens of probes among those of users, so a window with any of them is left out.
WasProbed = Callable[[str, str, datetime, datetime], bool]


def never_probed(_server: str, _url: str, _begun_at: datetime, _ended_at: datetime) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Judged:
    """`windows`: those to store; the next one begins at this reading once they are, unless it `goes_on`.
    `unfinished`: what the next reading is judged with, where counts are printed rounded."""

    condition: Condition
    detail: str
    windows: Sequence[Window] = ()
    goes_on: bool = False
    unfinished: Unfinished | None = None


def judge(
    adapter: Adapter,
    before: Reading | None,
    reading: Reading,
    known: Identity,
    url: str = "",
    was_probed: WasProbed = never_probed,
    unfinished: Unfinished | None = None,
    *,
    drafted: Drafted | None = None,
) -> Judged:
    """`before`: the reading at which the last stored window ended; None if there is none. `unfinished`: as it
    was judged with the reading before this one. `drafted`: what the server did with, if perhaps before its
    last start: where it does not any more, it has stopped. Raises Incomplete."""
    try:
        windows = adapter.windows(before or reading, reading, known)
    except LeftOut as reason:
        return Judged("reporting", f"a window was left out: {reason}")
    never = condition_of(windows) == "not_speculating"  # since its start
    if never and drafted:
        windows = [_of_one_that_drafted(window, drafted) for window in windows]
    # One that has just started may print nothing of what it generates before it does.
    condition = condition_of(windows) if windows or not drafted else "idle"
    if condition == "not_speculating":
        return Judged(condition, f"{adapter.name} answers, but does not speculate; {adapter.speculate}")
    if before is None:
        return Judged("waiting", "the next scrape or export gives its first window")
    if windows and was_probed(known.server, url, before.at, reading.at):
        return Judged("reporting", "a window was left out: canary probes were asked in it")
    if any(window.goes_on or (window.precision and not window.drafted) for window in windows):
        return _judge_unfinished(adapter, before, reading, known, unfinished or Unfinished(before, before))
    stored = [window for window in windows if window.condition in RECORDED]
    advice = _advice(condition, adapter, windows)
    if never and condition == "drafting_stopped":
        advice = f"{advice}, and has not drafted since it started; {adapter.speculate}"
    return Judged(condition, advice, stored)


def _of_one_that_drafted(window: Window, drafted: Drafted) -> Window:
    draft, method = window.draft or drafted.draft, window.method or drafted.method
    return replace(window, speculated_before=True, counts_drafts=True, draft=draft, method=method)


def _judge_unfinished(
    adapter: Adapter, before: Reading, reading: Reading, known: Identity, last: Unfinished
) -> Judged:
    """Where the window from `before` has too few draft tokens to be stored. The condition is that since the
    newest reading, as it is of servers whose counts are exact: an idle server is not busy with what it
    drafted earlier.

    That drafting stopped shows only after as many tokens as a window has, and holds until a draft token is
    counted. Meanwhile windows without drafts are stored. What was drafted before the first of them is left
    out, since its acceptance would not be exact.
    """
    newest = adapter.windows(last.newest, reading, known)
    condition = condition_of(newest)
    drafting = reading if any(window.drafted for window in newest) else last.drafting
    unfinished = Unfinished(reading, drafting)
    undrafted = adapter.windows(drafting, reading, known)
    if condition != "idle" and condition_of(undrafted) == "drafting_stopped":
        begun = max(before, drafting, key=lambda one: one.at)
        stored = adapter.windows(begun, reading, known)
        detail = _advice("drafting_stopped", adapter, undrafted)
        return Judged("drafting_stopped", detail, stored, unfinished=unfinished)
    return Judged(condition, _advice(condition, adapter, newest), goes_on=True, unfinished=unfinished)


def _advice(condition: Condition, adapter: Adapter, windows: Sequence[Window]) -> str:
    if condition == "drafting_stopped":
        tokens = sum(window.generated or 0 for window in windows)
        return f"{adapter.name} generated {tokens:,} tokens without a draft since the last window"
    if condition == "stalled":
        return "requests are running, but no token was counted since the last reading: does its engine hang?"
    return next((window.precision for window in windows if window.precision), "")
