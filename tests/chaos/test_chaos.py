"""The short form of `make chaos`: what is counted after a few of the attacks."""

from __future__ import annotations

import pytest

from tests.chaos.bad_receivers import receivers_misbehave
from tests.chaos.cases import Case
from tests.chaos.hostile import foreign_writes
from tests.chaos.outages import postmaster_is_killed, sidecar_is_killed
from tests.chaos.poison import one_stream_raises
from tests.chaos.row import cells

pytestmark = pytest.mark.slow

SEED = 5


@pytest.mark.parametrize(
    ("case", "rounds"),
    [(sidecar_is_killed, 2), (postmaster_is_killed, 1), (receivers_misbehave, 1), (foreign_writes, 1)],
)
def test_nothing_is_lost_doubled_or_left_untold(case: Case, rounds: int) -> None:
    print("seed", SEED)
    row = case(SEED, rounds)
    assert row is not None
    assert row.wrong == [], cells(row)


def test_a_stream_that_raises_stops_no_other_and_is_told() -> None:
    row = one_stream_raises(SEED, 1, healthy=4)
    assert row.wrong == [], cells(row)
