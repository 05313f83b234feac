"""A rise of acceptance: what mended it may be named, but nothing is to be repaired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from driftguard.diagnosis import CONFIDENCES, Diagnosis, Observed, ProbeResult, diagnose
from driftguard.diagnosis.verdict import _ACTIONS, Verdict
from driftguard.records.documents.diagnosis import Cause
from tests.diagnosis.cases import fell, probes, requests

COUNTS = {"code": 60, "german": 60}


def rose(before: Sequence[Observed], after: Sequence[Observed], **more: object) -> Diagnosis:
    found = diagnose(
        fell(direction="up", changed=("german",), before=tuple(before), after=tuple(after), **more)
    )
    assert "less" not in found.reason
    assert "fell" not in found.reason
    assert "restart" not in found.recommended_action
    return found


def warm(asked: Sequence[ProbeResult]) -> tuple[ProbeResult, ...]:
    """The same again at once, from the prefix cache."""
    return tuple(replace(one, is_warm=True) for one in asked)


def test_warm_probes_that_rose_alone_are_no_broken_prefix_cache() -> None:
    found = rose(
        requests(1, COUNTS, {"code": 0.75, "german": 0.6}),
        requests(2, COUNTS, {"code": 0.75, "german": 0.9}),
        probes_before=probes() * 2 + warm(probes() * 2),
        probes_after=probes() + warm(probes(0.2)),
    )
    assert found.cause != "cache"


def test_long_prompts_that_rose_alone_are_no_broken_prefix_cache() -> None:
    assert rose(long_and_short(1, 0.4), long_and_short(2, 0.6)).cause != "cache"


def long_and_short(seed: int, rate_of_long: float) -> list[Observed]:
    random = np.random.default_rng(seed)
    found = []
    for one in requests(seed, {"german": 120}, {"german": 0.6}):
        is_long = bool(random.integers(0, 2))
        length = int(random.integers(3_000, 4_000) if is_long else random.integers(50, 150))
        accepted = int(random.binomial(one.drafted, rate_of_long if is_long else 0.6))
        found.append(replace(one, prompt_tokens=length, accepted=accepted))
    return found


@pytest.mark.parametrize("cause", sorted({*_ACTIONS} - {"quality", "unknown"}))
def test_nothing_that_rose_is_to_be_repaired(cause: Cause) -> None:
    """But for looping output, which is easy to guess."""
    for confidence in CONFIDENCES:
        assert Verdict(cause, confidence, "").action("up").startswith("nothing to repair")


def test_a_target_that_nobody_announced_is_looked_for_though_acceptance_rose() -> None:
    action = Verdict("target_replaced", "high", "", is_fault=True).action("up")
    assert action.startswith("find out why the target answers otherwise")
