"""Who asks first is next, however often the one before asks again."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from driftguard_engine.decode.turns import Turns

from tests.engine.server.serving import wait_until


def turns_were_asked(turns: Turns, count: int) -> bool:
    return len(turns._asked) == count


def test_who_asks_again_at_once_waits_for_who_asked_before() -> None:
    turns, order = Turns(), list[str]()

    def once(name: str) -> None:
        with turns.turn():
            order.append(name)

    waiting = [threading.Thread(target=once, args=(name,)) for name in ("b", "c")]
    with turns.turn():
        for thread in waiting:
            before = len(turns._asked)
            thread.start()
            wait_until(partial(turns_were_asked, turns, before + 1), "the next one waits")
        order.append("a")
    once("a again")
    for thread in waiting:
        thread.join()
    assert order == ["a", "b", "c", "a again"]


def test_an_error_ends_a_turn() -> None:
    turns = Turns()
    with pytest.raises(ValueError, match="broken"), turns.turn():
        raise ValueError("broken")
    with turns.turn():
        pass


class Interrupted(threading.Condition):
    """The first wait ends as Ctrl-C ends it."""

    interrupted = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        return super().wait(timeout)


def test_who_gives_up_waiting_keeps_nobody_out() -> None:
    turns = Turns()
    turns._changed = Interrupted()
    with turns.turn(), pytest.raises(KeyboardInterrupt), turns.turn():
        raise AssertionError("two have their turn")
    with turns.turn():
        pass
