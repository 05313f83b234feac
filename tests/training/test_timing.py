"""Which of several times counts, by a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from driftguard_training import timing

from tests.training.small_models import small_model


@pytest.fixture
def two_threads() -> Iterator[None]:
    given = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(given)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.calls = 0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


@pytest.mark.parametrize("quickest", [1, 2])
@pytest.mark.usefixtures("two_threads")
def test_a_pass_is_timed_on_as_many_threads_as_are_quickest(clock: Clock, quickest: int) -> None:
    """A small model of which five tokens took twice as long on two threads as on one was said to gain nothing
    from a corpus with which its engine was half as fast again."""

    def call() -> None:
        clock.now += 7.0 if torch.get_num_threads() == quickest else 18.0

    assert timing.seconds_in_turns([timing.Timed(call, 1_000)]) == [7.0]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("most", [1, 2, 7, 1_000])
@pytest.mark.usefixtures("two_threads")
def test_no_more_calls_than_there_is_room_for(clock: Clock, most: int) -> None:

    def call() -> None:
        clock.calls += 1
        clock.now += 50.0 if clock.calls == 1 else 3.0

    (seconds,) = timing.seconds_in_turns([timing.Timed(call, most)])
    assert seconds == (50.0 if most == 1 else 3.0)
    assert 1 <= clock.calls <= most


@pytest.mark.parametrize("busy", [(0, 20), (15, 1_000), (10, 40)])
@pytest.mark.usefixtures("two_threads")
def test_a_machine_that_is_busy_for_a_while_makes_no_draft_slower_than_another(
    clock: Clock, busy: tuple[int, int]
) -> None:
    """By such times a corpus with which its engine was half as fast again was rejected as twice as slow."""
    begin, end = busy

    def of(seconds: float) -> timing.Timed:
        def call() -> None:
            clock.calls += 1
            clock.now += seconds * (3.0 if begin <= clock.calls < end else 1.0)

        return timing.Timed(call, 1_000, tokens=2)

    assert timing.seconds_in_turns([of(8.0), of(1.0), of(2.0)]) == [4.0, 0.5, 1.0]


def test_a_context_shorter_than_a_step_of_k_is_timed_with_what_it_takes() -> None:
    """A server makes no longer step with this target."""
    target = small_model(1)
    target.config.max_position_embeddings = 4
    (seconds,) = timing.seconds_in_turns([timing.timed_pass(target, 9)])
    assert seconds > 0.0
