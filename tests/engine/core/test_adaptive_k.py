"""Adaptive K in the engine: the same text, fewer or more draft tokens, and what it decided is told."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import pytest
from driftguard_engine.core import Request
from driftguard_engine.engine import Engine
from driftguard_engine.server.metrics import Metrics
from driftguard_engine.telemetry.telemetry import Telemetry, record_of

from tests.engine.core.tiny import request, serve

pytestmark = pytest.mark.slow


def requests() -> list[Request]:
    return [request(f"r{index}", [index + 1, 7, 9], max_tokens=60 + 7 * index) for index in range(6)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("drafter", ["draft_model", "ngram"])
def test_greedy_text_is_that_of_a_fixed_k(
    new_engine: Callable[..., Engine], drafter: str, ahead: bool
) -> None:
    fixed = serve(new_engine(drafter=drafter), *requests())
    engine = new_engine(drafter=drafter, adaptive_k=True, ahead=ahead)
    adaptive = serve(engine, *requests())
    for name, each in fixed.items():
        assert adaptive[name].output_token_ids == each.output_token_ids
    void = len(adaptive) if ahead else 0  # an ended request takes part in one step more
    steps = sum(each.counts.steps for each in adaptive.values())
    assert sum(engine.drafting.reasons.values()) == steps + void
    assert engine.drafting.reasons["fixed"] == 0
    exported = Metrics(engine, Telemetry(None, None, "s", "t")).text().decode()
    assert "driftguard_engine_adaptive_k 1.0\n" in exported
    assert 'driftguard_engine_step_seconds{num_speculative_tokens="0"} 0.0' in exported
    learning = float(engine.drafting.reasons["learning"])
    assert f'driftguard_engine_drafting_decisions_total{{reason="learning"}} {learning}\n' in exported


def test_k_is_that_of_the_decision_and_at_most_what_was_asked_for(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine(adaptive_k=True)
    served = serve(
        engine, request("none", num_speculative_tokens=0), request("few", num_speculative_tokens=2)
    )
    assert served["none"].counts.drafted == 0
    assert len(served["few"].counts.drafted_per_position) <= 2
    assert engine.drafting.reasons["learning"] > 0
    engine.set_speculation(False)
    before = engine.drafting.reasons["not_asked"]
    serve(engine, request("off", max_tokens=5))
    assert engine.drafting.reasons["not_asked"] == before + 5
    assert engine.drafting.decision.num_speculative_tokens == 0


def test_a_record_names_k_only_where_it_was_fixed(new_engine: Callable[..., Engine]) -> None:
    """A K that moves begins no new baseline, and nobody takes the largest for the one that was used."""
    told = {}
    for adaptive in (False, True):
        engine = new_engine(adaptive_k=adaptive)
        served = serve(engine, request("on"), request("off", num_speculative_tokens=0))
        told[adaptive] = [
            record_of(served[name], UUID(int=1), "s", "t").num_speculative_tokens for name in ("on", "off")
        ]
    assert told == {False: [4, 0], True: [None, 0]}
