from __future__ import annotations

from collections.abc import Sequence

from driftguard_engine.prefix_cache import blocks_of
from driftguard_engine.scheduler import Admission, PrefillChunk, ReusedPrefix, Schedule, Scheduler


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


def prompt(scheduler: Scheduler, name: str, blocks: Sequence[str], tokens: int | None = None) -> Schedule:
    """Runs a request of these blocks of 8 tokens until it has been read; the plan of its first step."""
    scheduler.enqueue(name, 8 * len(blocks) + 1 if tokens is None else tokens, [b.encode() for b in blocks])
    plans = [start(scheduler)]
    while name not in plans[-1].decode:
        plans.append(scheduler.plan())
    return plans[0]


def start(scheduler: Scheduler) -> Schedule:
    for admission in scheduler.admit():
        scheduler.begin(admission.request_id, None)
    return scheduler.plan()


def test_a_prompt_goes_on_where_it_was_kept() -> None:
    scheduler = Scheduler(slots=3, chunk_tokens=8)
    prompt(scheduler, "a", "uvw")
    scheduler.remove("a")
    plan = prompt(scheduler, "b", "uvwx")
    assert plan.reused == (ReusedPrefix("b", 0, 0, 24),)
    assert plan.prefill == (PrefillChunk("b", 24, 8, is_block=True),)


def test_what_another_slot_holds_is_copied_and_stays_there() -> None:
    scheduler = Scheduler(slots=3, chunk_tokens=8)
    prompt(scheduler, "a", "uvw")
    assert prompt(scheduler, "b", "uvx").reused == (ReusedPrefix("b", 0, 0, 16),)  # while "a" runs
    scheduler.remove("a")
    scheduler.remove("b")
    assert prompt(scheduler, "c", "uvy").reused == (ReusedPrefix("c", 0, 0, 16),)
    assert prompt(scheduler, "d", "uvw").reused == (ReusedPrefix("d", 0, 0, 24),)
    assert prompt(scheduler, "e", "uvx").reused == (ReusedPrefix("e", 1, 0, 24),)


def test_the_slot_used_least_recently_is_given_away_first() -> None:
    scheduler = Scheduler(slots=2, chunk_tokens=8)
    for name in "uv":
        prompt(scheduler, name, name)
    scheduler.remove("v")
    scheduler.remove("u")
    prompt(scheduler, "w", "w")
    scheduler.remove("w")
    assert prompt(scheduler, "again u", "u").reused == (ReusedPrefix("again u", 0, 0, 8),)
    scheduler.remove("again u")
    assert prompt(scheduler, "again v", "v").reused == ()


def test_prompts_that_begin_alike_wait_for_the_first_of_them() -> None:
    scheduler = Scheduler(slots=2, chunk_tokens=8)
    for name in "ab":
        scheduler.enqueue(name, 17, (b"u", b"v"))
    plans = [start(scheduler), *(scheduler.plan() for _ in range(2))]
    assert [plan.reused for plan in plans] == [
        (),
        (ReusedPrefix("b", 0, 0, 8),),
        (ReusedPrefix("b", 0, 8, 8),),
    ]
    assert plans[2].prefill == (PrefillChunk("a", 16, 1), PrefillChunk("b", 16, 1))


def test_names_of_blocks_are_those_of_whole_prefixes() -> None:
    tokens = list(range(100))
    names = blocks_of(tokens, 8)
    assert len(names) == len(set(names)) == 12
    assert [len(blocks_of(tokens[:length], 8)) for length in (1, 9, 10, 17, 18)] == [0, 0, 1, 1, 2]
    assert blocks_of([*tokens[:50], *tokens], 8)[:6] == names[:6]
    changed = blocks_of([*tokens[:8], 0, *tokens[9:]], 8)
    assert [old == new for old, new in zip(names, changed, strict=True)] == [True] + [False] * 11
