from __future__ import annotations

from driftguard_engine.scheduler import Admission, PrefillChunk, Scheduler


def test_requests_are_admitted_first_come_first_served_into_the_lowest_free_slots() -> None:
    scheduler = Scheduler(slots=2, chunk_tokens=8)
    for name in "abc":
        scheduler.enqueue(name, 0)
    assert scheduler.admit() == [Admission("a", 0), Admission("b", 1)]
    assert (scheduler.running, scheduler.waiting) == (2, 1)
    assert scheduler.admit() == []
    scheduler.remove("a")
    assert scheduler.admit() == [Admission("c", 0)]


def test_a_long_prompt_is_read_in_chunks_while_others_decode() -> None:
    scheduler = Scheduler(slots=2, chunk_tokens=8)
    scheduler.enqueue("short", 0)
    scheduler.enqueue("long", 20)
    scheduler.admit()
    plans = [scheduler.plan() for _ in range(4)]
    assert [plan.prefill for plan in plans] == [
        (PrefillChunk("long", 0, 8),),
        (PrefillChunk("long", 8, 8),),
        (PrefillChunk("long", 16, 4),),
        (),
    ]
    assert [plan.decode for plan in plans] == [("short",), ("short",), ("short", "long"), ("short", "long")]


def test_short_prompts_share_a_step_and_never_overtake_a_longer_one() -> None:
    scheduler = Scheduler(slots=4, chunk_tokens=8)
    for name, length in (("a", 3), ("b", 4), ("c", 6), ("d", 1)):
        scheduler.enqueue(name, length)
    scheduler.admit()
    first, second = scheduler.plan(), scheduler.plan()
    assert first.prefill == (PrefillChunk("a", 0, 3), PrefillChunk("b", 0, 4))
    assert second.prefill == (PrefillChunk("c", 0, 6), PrefillChunk("d", 0, 1))


def test_chunks_of_a_prompt_depend_on_its_own_length_alone() -> None:
    def chunks(*before: int) -> list[int]:
        scheduler = Scheduler(slots=4, chunk_tokens=8)
        for index, length in enumerate(before):
            scheduler.enqueue(f"other{index}", length)
        scheduler.enqueue("own", 19)
        scheduler.admit()
        plans = [scheduler.plan() for _ in range(12)]
        return [chunk.count for plan in plans for chunk in plan.prefill if chunk.request_id == "own"]

    assert chunks() == chunks(5) == chunks(13, 2, 7) == [8, 8, 3]


def test_a_waiting_request_can_be_removed() -> None:
    scheduler = Scheduler(slots=1, chunk_tokens=8)
    for name in "abc":
        scheduler.enqueue(name, 0)
    scheduler.admit()
    scheduler.remove("b")
    scheduler.remove("unknown")
    scheduler.remove("a")
    assert scheduler.admit() == [Admission("c", 0)]
