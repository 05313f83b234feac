"""The watch over goodput: what it compares with what, what it learns, and how often it is wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from driftguard.cost import goodput
from driftguard.cost.block_bets import SURE_STAKES, bet_of_unit_variance
from driftguard.records.documents.goodput import GoodputWatch, Rivalry, Watched
from tests.cost.goodput_runs import DAY, Stream, until_alarm
from tests.cost.goodput_traffic import Machine
from tests.cost.rival_traffic import BAND, Rivals, RivalStream

LEVEL = goodput.alarm_level(90.0)


@pytest.mark.parametrize("seed", range(3))
def test_a_slower_machine_is_found_with_its_size_and_beginning(seed: int) -> None:
    alarm = until_alarm(seed, LEVEL, {"slower": 2.0}, days=1.0)
    assert alarm is not None
    assert alarm.kind == "slower"
    assert alarm.lost == pytest.approx(0.5, abs=0.1)
    assert abs(alarm.since - DAY) <= 3 * goodput.BLOCK_SECONDS


@pytest.mark.parametrize("seed", range(3))
def test_speculation_that_begins_to_lose_is_found_although_nothing_gets_slower(seed: int) -> None:
    """Requests without speculation get faster, those with it stay."""
    machine = {"without": 0.1, "acceptance": 0.5, "base": 0.02, "per_draft": 0.005}
    alarm = until_alarm(seed, LEVEL, {"base": 0.009, "per_draft": 0.00775}, days=2.0, **machine)
    assert alarm is not None
    assert alarm.kind == "speculation_loses"


LEAST = -math.log1p(-goodput.LEAST_GAIN)
AS_FAST = {
    "few with it": Rivals(without=240, faster=LEAST),
    "few with it, of other times": Rivals(without=240, noise_speculating=0.6, faster=LEAST),
    "few without": Rivals(speculating=27, without=3, faster=LEAST),
    "tasks in bursts": Rivals(bursts=0.15, faster=LEAST),
    "restarts": Rivals(without=120, restarts=0.05, faster=LEAST),
    "a rhythm of the day": Rivals(daily=4.0, faster=LEAST),
}


@pytest.mark.parametrize("kind", AS_FAST)
def test_speculation_that_costs_no_more_than_it_may_is_not_said_to_lose(kind: str) -> None:
    """At A = 300 blocks, of which one band has a thirty-second: .06 statements in two days are allowed."""
    assert [RivalStream(seed, 300.0).statements(AS_FAST[kind], 288) for seed in (70, 71)] == [[], []]


@pytest.mark.parametrize(("without", "faster"), [(240, 0.1), (20, 0.2), (3, 0.3)])
def test_speculation_that_begins_to_lose_is_found_where_few_are_compared(without: int, faster: float) -> None:
    """Within eight hours."""
    for seed in (80, 81):
        stream = RivalStream(seed, LEVEL)
        assert stream.statements(Rivals(without=without), 144) == []
        assert stream.statements(Rivals(without=without, faster=faster), 96)


def test_evidence_of_an_older_version_that_speculation_loses_begins_anew() -> None:
    """It took the mean time of the few with speculation for known."""
    stream = RivalStream(82, LEVEL)
    old = Rivalry(BAND, count=40_000, mean=0.01, squares=4_000.0, sums=(1e9, 1e9, 1e9), since_seq=1)
    stream.watch = replace(stream.watch, rivalries=(old,))
    assert stream.statements(Rivals(without=240), 2) == []
    (rivalry,) = stream.watch.rivalries
    assert (rivalry.sums, rivalry.since_seq) == ((0.0, 0.0, 0.0), None)
    assert rivalry.count > 40_000


def test_a_bet_of_unit_variance_is_worth_one_at_most_however_skewed_what_it_is_on() -> None:
    """Two values of mean zero and variance one, or of a mean below; the first has the chance `part`."""
    for part in np.geomspace(1e-4, 0.9999, 200).tolist():
        high, low = math.sqrt((1.0 - part) / part), -math.sqrt(part / (1.0 - part))
        for shift in (0.0, 0.2, 1.0, 5.0):
            won, lost = (bet_of_unit_variance((), value - shift) for value in (high, low))
            for place in range(len(SURE_STAKES)):
                assert part * won[place] + (1.0 - part) * lost[place] <= 1.0 + 1e-12


def test_a_speed_that_falls_bit_by_bit_is_not_learned_as_usual() -> None:
    """A third slower in a day and a half: what is compared with lags behind."""
    stream = Stream(4, LEVEL)
    assert stream.run(1.0) == []
    alarms = []
    for _ in range(36):
        stream.machine.slower *= 1.5 ** (1 / 36)
        alarms += stream.run(1.0 / 24.0)
    assert alarms


def test_a_fall_that_lasts_is_not_called_over_by_a_good_mood() -> None:
    """The speed wanders by 15% for half an hour at a time, for three days."""
    for seed in (606, 607):
        stream = Stream(seed, LEVEL, mood=0.15)
        stream.run(1.0)
        stream.machine.slower = 1.5
        opened = Watched(UUID(int=seed), "slower", slower=math.log(1.5))
        stream.watch = goodput.with_opened(stream.watch, opened)
        for _ in range(72):
            stream.fold(1.0 / 24.0)
            assert not goodput.is_over(stream.watch), seed
        stream.machine.slower = 1.0
        stream.fold(0.5)
        assert goodput.is_over(stream.watch), seed


def test_a_mood_of_hours_is_not_the_end_of_a_fall_and_a_repair_is() -> None:
    """The speed wanders by 15% for four hours at a time: half of the fall is hardly more than its spread."""
    for seed in (60_002, 60_003):
        stream = Stream(seed, LEVEL, mood=0.15, mood_minutes=240.0)
        stream.run(1.0)
        stream.machine.slower = 1.5
        stream.fold(0.05)
        opened = Watched(UUID(int=seed), "slower", slower=math.log(1.5))
        stream.watch = goodput.with_opened(stream.watch, opened)
        for _ in range(40):
            stream.fold(1.0 / 24.0)
            assert not goodput.is_over(stream.watch), seed
        stream.machine.slower = 1.0
        stream.fold(1.0)
        assert goodput.is_over(stream.watch), seed


def test_a_fall_that_an_older_version_followed_goes_on_with_the_next_block() -> None:
    """It kept the bets, and not by how much the blocks were slower."""
    watch = Stream(8, LEVEL).watch
    kept = Watched(UUID(int=8), "slower", slower=0.4, sums=(1e3, 1e3, 1e3), blocks=40)
    watch = replace(watch, opened=kept, spread=(0.0, 0.05) * 40)
    assert not goodput.is_over(watch)
    back = replace(kept, sums=(1e3, 1e3, 1e3), moves=(0.4,) * 12 + (0.0,) * 12, blocks=64)
    assert goodput.is_over(replace(watch, opened=back))


def test_a_full_band_of_loads_is_no_fall() -> None:
    """From 9 to 16 requests at once, within one band, each in proportion slower."""
    stream = Stream(5, LEVEL, load=9.0, slope=1.0)
    assert stream.run(1.0) == []
    stream.machine.load = 16.0
    assert stream.run(0.5) == []


def test_the_blocks_are_the_same_however_they_are_read() -> None:
    machine = Machine()
    rng = np.random.default_rng(6)
    read = [goodput.Numbered(seq + 1, one) for seq, one in enumerate(machine.serve(rng, 2_000))]
    at_once = goodput.fold(GoodputWatch(), read)
    watch = GoodputWatch()
    for end in range(50, len(read) + 1, 50):
        watch = goodput.fold(watch, [item for item in read[:end] if item.seq > watch.seq])
    assert watch == at_once
    assert 0 < len(read) - watch.seq < 60


def test_a_clock_that_lies_delays_and_breaks_nothing() -> None:
    """All at one instant make no block; a jump of a year ends one."""
    machine = Machine()
    rng = np.random.default_rng(7)
    still = machine.serve(rng, 500, ended_at=machine.clock)
    read = [goodput.Numbered(seq + 1, one) for seq, one in enumerate(still)]
    assert goodput.fold(GoodputWatch(), read) == GoodputWatch()
    (late,) = machine.serve(rng, 1, ended_at=machine.clock + 365 * DAY)
    watch = goodput.fold(GoodputWatch(), [*read, goodput.Numbered(501, late)])
    assert watch.seq == 501
    assert all(math.isfinite(cell.log_time) for block in watch.pending for cell in block.cells)


UGLY: dict[str, dict[str, Any]] = {
    "mood": {"mood": 0.15},
    "long mood": {"mood": 0.15, "mood_minutes": 240.0},
    "daily load": {"daily": 2.0, "mood": 0.1, "slope": 1.0},
    "stalls": {"stalls": 0.2, "noise": 0.4},
    "as fast without": {"without": 0.1, "per_draft": 0.0, "acceptance": 0.0, "mood": 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", UGLY)
def test_false_alarms_are_no_more_than_stated(kind: str) -> None:
    """At A = 300 blocks, so that there are enough to count; eight streams of five days, seeds 600 to 607."""
    alarms = sum(len(Stream(600 + number, 300.0, **UGLY[kind]).run(5.0)) for number in range(8))
    expected = 8 * 5 * DAY / goodput.BLOCK_SECONDS / 300.0
    assert alarms <= expected
