"""Why tokens come slower: K that follows acceptance is never the reason, and probes that fell are told so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from driftguard.diagnosis import Diagnosis, Observed, diagnose
from driftguard.records.documents.goodput import GoodputChange
from tests.diagnosis.cases import SEGMENTS, fell, probes, requests

COUNTS = {"code": 60, "german": 60}
RATES = {"code": 0.75, "german": 0.7}
SLOWER = GoodputChange(
    kind="slower", concurrency=(9, 16), lost=0.3, requests=100, acceptance="none", false_alarm_days=90.0
)


def timed(served: Sequence[Observed], seconds_per_step: float) -> tuple[Observed, ...]:
    return tuple(
        replace(
            one,
            output_tokens=one.accepted + one.steps,
            time_per_output_token_seconds=seconds_per_step * one.steps / (one.accepted + one.steps),
        )
        for one in served
    )


def slower(before: Sequence[Observed], after: Sequence[Observed], **more: object) -> Diagnosis:
    values = {"direction": "slower", "goodput": SLOWER, "changed": SEGMENTS, **more}
    return diagnose(fell(before=timed(before, 0.02), after=timed(after, 0.03), **values))


def of_adaptive_k(seed: int, k: int) -> list[Observed]:
    """Judged by the first draft token, as K varies from step to step."""
    drawn = requests(seed, COUNTS, RATES, k=k, first_rate=0.8)
    return [replace(one, num_speculative_tokens=None, by_first=True) for one in drawn]


def of_lookup(seed: int, drafted_per_step: float) -> list[Observed]:
    """Of a drafter that finds fewer than K tokens now and then."""
    random = np.random.default_rng(seed)
    found = []
    for one in requests(seed, COUNTS, RATES, k=5):
        drafted = int(one.steps * np.clip(random.normal(drafted_per_step, 0.15), 0.5, 5))
        accepted = int(0.6 * drafted)
        found.append(
            replace(one, drafted=drafted, accepted=accepted, first_drafted=None, first_accepted=None)
        )
    return found


def test_a_machine_that_became_slower_is_not_told_as_the_k_that_follows_it() -> None:
    found = slower(of_adaptive_k(1, 5), of_adaptive_k(2, 3))
    assert (found.cause, found.confidence) == ("machine", "medium")


def test_nor_as_what_a_lookup_found_to_draft_at_the_same_k() -> None:
    assert slower(of_lookup(1, 4.4), of_lookup(2, 4.1)).cause == "machine"


def test_nor_as_a_k_that_is_told_only_on_one_side() -> None:
    before = requests(1, COUNTS, RATES, k=5, first_rate=0.8)
    assert slower(before, of_adaptive_k(2, 3)).cause == "machine"
    assert slower(of_adaptive_k(2, 3), before).cause == "machine"


def test_another_k_that_is_told_is_the_reason() -> None:
    found = slower(requests(1, COUNTS, RATES, k=5), requests(2, COUNTS, RATES, k=3))
    assert found.cause == "configuration"
    assert found.summary == "the configuration: K (num_speculative_tokens) 5 to 3"


def test_canary_probes_that_fell_with_goodput_are_told_to_have_fallen() -> None:
    low = requests(2, COUNTS, {"code": 0.45, "german": 0.4})
    both = replace(SLOWER, acceptance="fell", by_acceptance=True)
    found = slower(
        requests(1, COUNTS, RATES),
        low,
        goodput=both,
        probes_before=probes() * 2,
        probes_after=probes(-0.3),
    )
    (told,) = (fact.text for fact in found.facts if fact.about == "probes")
    assert told.startswith("canary probes moved with the traffic: 0.65 before, 0.35 now")
