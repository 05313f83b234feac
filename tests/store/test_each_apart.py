"""Chores over many streams or incidents, of which some fail each time."""

from __future__ import annotations

import pytest

from driftguard.store.database import CHORE, DatabaseTimeout, each_apart


def test_what_takes_too_long_every_time_does_not_keep_the_others_from_their_turn_for_good() -> None:
    """A second one of those ends a look, since the database may be slow for all."""
    items, slow, done, told = range(20), {0, 1}, set[int](), list[int]()

    def work(item: int) -> None:
        if item in slow:
            raise DatabaseTimeout("took too long", CHORE, "statement")
        done.add(item)

    for _ in range(60):  # each other item is missed by one in three looks: by all in one of 10 ** 27 runs
        told.clear()
        with pytest.raises(DatabaseTimeout):
            each_apart(items, work, told.append)
        assert len(told) == 1
    assert done == set(items) - slow
