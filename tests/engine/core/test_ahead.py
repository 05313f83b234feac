"""Drafts that a second process prepares beside the target's pass: speed alone is another than without it."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driftguard_engine.config import InvalidConfig
from driftguard_engine.core import FinishedRequest, InvalidModel, Request, SpeculationCounts
from driftguard_engine.drafters import ahead, ahead_process, ahead_worker
from driftguard_engine.drafters.ahead import AheadDrafter
from driftguard_engine.drafters.ahead_process import AheadProcess
from driftguard_engine.drafters.ahead_worker import AheadRow, Outcome, Preparer
from driftguard_engine.engine import Engine
from driftguard_engine.kernels.reference.sampling import EVERY, Index
from driftguard_engine.kernels.reference.verify import Noise, StepNoise
from driftguard_engine.kv_cache import SlotCache, Span
from driftguard_engine.server.metrics import Metrics
from driftguard_engine.speculation import ReferenceVerification
from driftguard_engine.telemetry.telemetry import Telemetry

from tests.engine.core.every_drafter import ThreadOfTest
from tests.engine.core.test_batch_independence import served_together, varied_requests
from tests.engine.core.tiny import drain, finished, plain_greedy, request, save, serve

SPAWNED = AheadProcess


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "AheadProcess", ThreadOfTest)


def drafter_of(engine: Engine) -> AheadDrafter:
    drafter = engine._drafts.drafter
    assert isinstance(drafter, AheadDrafter)
    return drafter


def requests() -> list[Request]:
    """Various ones too, with and without drafts."""
    return [*varied_requests(8), *drafted_requests()]


def drafted_requests() -> list[Request]:
    """Three that begin alike, and some whose drafts are often accepted."""
    alike = [request(f"a{index}", (*range(40, 60), index), 30, temperature=0.8, seed=1) for index in range(3)]
    longer = [
        request(f"l{index}", (index, 7), 60, temperature=0.5 * (index % 2), seed=9) for index in range(4)
    ]
    return [*alike, *longer]


def told(done: dict[str, FinishedRequest]) -> dict[str, tuple[tuple[int, ...], SpeculationCounts]]:
    """What each request got, and how many of which drafts were accepted: what was drafted is in both."""
    return {name: (each.output_token_ids, each.counts) for name, each in done.items()}


@pytest.fixture(scope="module")
def alone(new_engine: Callable[..., Engine]) -> Callable[[str], Any]:
    """What is told of each request by itself with the draft model alone, by the rule of verification."""
    found: dict[str, Any] = {}

    def outputs(rule: str) -> Any:
        if rule not in found:
            engine = new_engine(verification=rule)
            found[rule] = {
                name: each for one in requests() for name, each in told(serve(engine, one)).items()
            }
        return found[rule]

    return outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "rule", "worker"),
    [
        ("ssd", "token", SPAWNED),
        ("ssd", "block", ThreadOfTest),
        ("mirror", "token", ThreadOfTest),
        ("mirror", "block", ThreadOfTest),
    ],
)
def test_each_seed_gives_the_output_of_the_draft_model_alone_in_any_batch(
    new_engine: Callable[..., Engine],
    alone: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    drafter: str,
    rule: str,
    worker: type[AheadProcess],
) -> None:
    monkeypatch.setattr(ahead, "AheadProcess", worker)
    engine = new_engine(drafter=drafter, verification=rule)
    assert told(served_together(engine, requests(), seed=1)) == alone(rule)
    counts = drafter_of(engine).counts
    assert 10 < counts.hits < counts.lookups - 10
    assert counts.lost_workers == 0
    assert engine.draft.method == drafter


@pytest.mark.usefixtures("threads")
def test_a_draft_with_a_shorter_context_and_few_outcomes_gives_the_same_too(
    new_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    draft = save(tmp_path / "short", "llama", seed=3, noise=0.03, max_position_embeddings=24)
    asked = [request(f"r{index}", (index, 7), 40) for index in range(4)]
    engine = new_engine(drafter="ssd", draft=draft, prepared_outcomes=2)
    assert told(serve(engine, *asked)) == told(serve(new_engine(draft=draft), *asked))
    assert drafter_of(engine).counts.hits > 0


@pytest.mark.usefixtures("threads")
def test_steps_without_drafts_and_other_numbers_of_drafts_may_come_between(
    new_engine: Callable[..., Engine], models: Path
) -> None:
    """The draft is the target itself: all its drafts are right."""
    engine = new_engine(drafter="ssd", draft=str(models / "llama"))
    prompts = {"a": (7,), "b": (1, 2, 3, 4) * 5}
    for name, prompt in prompts.items():
        engine.submit(request(name, prompt, 80))
    outputs = engine.step()
    rows = [*engine._sequences.values()]
    for step in range(1000):
        for index, row in enumerate(rows):
            row.num_speculative_tokens = (3, 3, 0, 2, 2, 5)[(step + index) % 6]
        if not engine.has_work():
            break
        outputs += engine.step()
    for name, done in finished(outputs + drain(engine)).items():
        assert done.output_token_ids == plain_greedy("llama", prompts[name], 80)
        assert done.counts.accepted == done.counts.drafted > 20
    counts = drafter_of(engine).counts
    assert 0 < counts.hits < counts.lookups


def guessed_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def least_likely(self: Preparer, index: int, row: AheadRow, acceptance: float) -> list[Outcome]:
        count = max(min(self._most(row), 1), 0)
        return [Outcome(index, 0, row.drafts[0])] * count

    monkeypatch.setattr(Preparer, "_likeliest", least_likely)


def guessed_by_the_noise_that_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    likeliest = Preparer._likeliest

    def by_noise(self: Preparer, index: int, row: AheadRow, acceptance: float) -> list[Outcome]:
        noise = StepNoise(np.array([row.sampling[3]]), np.array([row.length]), len(row.drafts) + 1)
        return likeliest(self, index, row, float(noise.accept[0, 0]))

    monkeypatch.setattr(Preparer, "_likeliest", by_noise)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("plant", [guessed_wrong, guessed_by_the_noise_that_verifies])
def test_which_outcomes_are_prepared_changes_no_token(
    new_engine: Callable[..., Engine],
    alone: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """For what is prepared is what would be drafted."""
    plant(monkeypatch)
    engine = new_engine(drafter="ssd")
    assert told(serve(engine, *drafted_requests())).items() <= alone("token").items()
    assert (drafter_of(engine).counts.hits == 0) == (plant is guessed_wrong)


def logits_of_another_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = AheadProcess.chosen

    def rotated(self: AheadProcess, number: int) -> list[Outcome]:
        found = chosen(self, number)
        return [*found[1:], *found[:1]]

    monkeypatch.setattr(AheadProcess, "chosen", rotated)


def logits_of_an_earlier_step(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, calls = Preparer.prepare, iter(range(10_000))
    monkeypatch.setattr(Preparer, "prepare", lambda *given: prepare(*given) if next(calls) % 2 == 0 else True)


def used_after_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the target's own token was, where as many drafts were accepted."""
    known: list[Outcome] = []
    chosen = AheadProcess.chosen

    def remember(self: AheadProcess, number: int) -> list[Outcome]:
        known[:] = chosen(self, number)
        return [*known]

    def nearest(row: int, accepted: int, own: int) -> Outcome | None:
        return next((each for each in known if each[:2] == (row, accepted)), None)

    monkeypatch.setattr(AheadProcess, "chosen", remember)
    monkeypatch.setattr(ahead, "Outcome", nearest)


def drafted_by_the_noise_that_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    class Verifying(StepNoise):
        def draft(self, step: int, rows: Index = EVERY) -> Noise:
            return replace(super().draft(step, rows), words=self._drawn[0][:, 1, rows, step])

    draw = ahead_worker._Abandonable.draw

    def draw_by_accept(self: ReferenceVerification, step: int) -> None:
        self._noise.__class__ = Verifying
        draw(self, step)  # type: ignore[arg-type]

    monkeypatch.setattr(ahead_worker._Abandonable, "draw", draw_by_accept)


def keys_of_rejected_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(self: Preparer, row: AheadRow, slot: int, end: int) -> None:
        first = self._held.get(slot, 0)
        self._model.copy(row.slot, Span(slot, first, end - first))
        self._held[slot] = max(end, first)  # as if what the drafts wrote were there for good

    monkeypatch.setattr(Preparer, "_copy", copy)


def keys_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is prepared the engine's cache gets nothing."""
    copy = SlotCache.copy

    def copy_for_outcomes(self: SlotCache, source: int, span: Span) -> None:
        if source < 4:
            copy(self, source, span)

    monkeypatch.setattr(SlotCache, "copy", copy_for_outcomes)


def keys_of_the_request_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AheadDrafter, "forget", lambda *_: None)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    "plant",
    [
        logits_of_another_outcome,
        logits_of_an_earlier_step,
        used_after_a_miss,
        drafted_by_the_noise_that_verifies,
        keys_of_rejected_drafts,
        keys_left_behind,
        keys_of_the_request_before,
    ],
)
def test_mistakes_in_what_is_prepared_are_seen(
    new_engine: Callable[..., Engine],
    alone: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    plant(monkeypatch)
    engine = new_engine(drafter="ssd")
    assert not told(serve(engine, *drafted_requests())).items() <= alone("token").items()
    assert drafter_of(engine).counts.hits > 0


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pid_of(engine: Engine) -> int:
    worker = drafter_of(engine)._worker
    assert isinstance(worker, SPAWNED)
    return worker.pid


@pytest.mark.slow
def test_a_process_that_is_killed_or_stands_still_loses_no_request_and_is_started_again(
    new_engine: Callable[..., Engine],
    alone: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = new_engine(drafter="ssd")
    drafter, pids = drafter_of(engine), []
    monkeypatch.setattr(ahead, "RESTART_SECONDS", 1e6)
    for number, seconds in ((signal.SIGKILL, 60.0), (signal.SIGSTOP, 0.3)):
        hits = drafter.counts.hits
        for each in drafted_requests():
            engine.submit(each)
        outputs = []
        while drafter.counts.hits == hits:
            outputs += engine.step()
        pids.append(pid_of(engine))
        monkeypatch.setattr(ahead_process, "PATIENCE_SECONDS", seconds)
        with caplog.at_level(logging.ERROR):
            os.kill(pids[-1], number)
            done = finished(outputs + drain(engine))
        assert len(done) == 7
        assert told(done).items() <= alone("token").items()
        assert drafter._worker is None
        assert not is_running(pids[-1])
        monkeypatch.setattr(ahead, "RESTART_SECONDS", 0.0)
        serve(engine, request())  # starts one, and does not wait for it
        monkeypatch.setattr(ahead, "RESTART_SECONDS", 1e6)
        assert drafter._worker is not None
        assert drafter._worker.ready(60)
    assert drafter.counts.lost_workers == 2
    killed, stopped = (record.getMessage() for record in caplog.records)
    assert "is lost (it ended with exit status -9); drafting without it" in killed
    assert "is lost (it gave no answer within 0.3 seconds)" in stopped


@pytest.mark.slow
def test_a_process_ends_with_its_draft(new_engine: Callable[..., Engine], models: Path) -> None:
    engine = new_engine(drafter="ssd")
    first = pid_of(engine)
    engine.submit(request("old", max_tokens=30))
    outputs = engine.step()
    info = engine.load_draft(str(models / "llama"), "v2")
    assert (engine.swap_draft("v2"), info.method) == (info, "ssd")
    engine.submit(request("new", max_tokens=30))
    done = finished(outputs + drain(engine))
    assert {each.output_token_ids for each in done.values()} == {plain_greedy("llama", (5, 6, 7), 30)}
    assert [done[name].draft.version for name in ("old", "new")] != ["v2", "v2"]
    assert drafter_of(engine).counts.hits > 0
    gc.collect()
    assert not is_running(first)
    second = pid_of(engine)
    del engine
    gc.collect()
    assert not is_running(second)


def test_a_process_that_does_not_start_is_told(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead_process, "_MAIN", "raise SystemExit(3)")
    told = "draft: the second process, which drafts ahead, does not start .it ended with exit status 3"
    with pytest.raises(InvalidModel, match=told):
        new_engine(drafter="ssd")


@pytest.mark.usefixtures("threads")
def test_what_cannot_be_drafted_ahead_of_is_refused_by_name(
    new_engine: Callable[..., Engine], models: Path, tmp_path: Path
) -> None:
    for settings, told in (
        (
            {"drafter": "ssd", "device": "cuda"},
            "drafter: 'ssd' drafts in a second process on the CPU, not yet with",
        ),
        ({"drafter": "mirror", "draft": None}, "draft: missing; the drafter 'mirror' needs"),
        (
            {"drafter": "ssd", "prepared_outcomes": 0},
            "prepared_outcomes: 0 is not a whole number of at least 1",
        ),
        ({"drafter": "ssd", "exit_layer": 1}, "exit_layer: given with the drafter 'ssd', but only 'mirror'"),
    ):
        with pytest.raises(InvalidConfig, match=told):
            new_engine(**settings)
    for settings, told in (
        ({"drafter": "mirror", "exit_layer": 2}, "exit_layer: 2 is not between 1 and 1; the target has 2"),
        ({"drafter": "ssd", "model_path": "generic"}, "draft: .*llama_draft runs on the generic path"),
        ({"drafter": "mirror", "target": str(models / "gpt2")}, "target: .*gpt2 runs on the generic path"),
    ):
        with pytest.raises(InvalidModel, match=told):
            new_engine(**settings)


@pytest.mark.usefixtures("threads")
def test_hits_and_overlap_are_told(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine(drafter="ssd")
    assert engine.ahead is not None
    assert (engine.ahead.hit_rate, engine.ahead.overlap) == (None, None)
    serve(engine, request(max_tokens=60))
    assert engine.ahead.lookups > 5
    found = engine.ahead.told()
    assert (found["hits"], found["lookups"]) == (engine.ahead.hits, engine.ahead.lookups)
    assert 0 < (found["hit_rate"] or 0) < 1
    assert 0 <= (found["overlap"] or 0) <= 1
    exported = Metrics(engine, Telemetry(None, None, "s", "t")).text().decode()
    assert f"driftguard_engine_ahead_hits_total {float(engine.ahead.hits)}\n" in exported
    assert new_engine().ahead is None
