"""Which cause is named, how sure, and above all: when a new draft is called for and when not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from driftguard.diagnosis import Diagnosis, Observed, diagnose
from tests.diagnosis.cases import (
    BEFORE,
    CAPTURED_BEFORE,
    CODE,
    GERMAN,
    LEGAL,
    captures,
    fell,
    probes,
    requests,
)

COUNTS = {"code": 60, "german": 60}
SAME_TOPICS = captures(3, "code", 60, CODE) + captures(4, "german", 60, GERMAN)
OTHER_TOPIC = captures(3, "code", 60, CODE) + captures(4, "german", 60, LEGAL)
FALLEN = {"code": 0.75, "german": 0.45}


def verdict(found: Diagnosis) -> tuple[str, str, bool]:
    return found.cause, found.confidence, found.retrain


def fact(found: Diagnosis, about: str) -> str:
    return next(one.text for one in found.facts if one.about == about)


def test_probes_that_fell_too_blame_the_machine_and_never_retrain() -> None:
    found = diagnose(
        fell(
            probes_before=probes() + probes(),
            probes_after=probes(-0.22),
            captures_before=CAPTURED_BEFORE,
            captures_after=OTHER_TOPIC,
        )
    )
    assert verdict(found) == ("machine", "high", False)
    assert "restart" in found.recommended_action
    assert "20 prompts" in fact(found, "probes")


def test_probes_that_fell_a_little_blame_the_machine_with_less_confidence() -> None:
    found = diagnose(fell(probes_before=probes() + probes(), probes_after=probes(-0.09)))
    assert verdict(found) == ("machine", "medium", False)
    assert "a part of it" in found.reason


def test_other_greedy_answers_are_a_target_exchanged_under_its_name_and_retrain_nothing() -> None:
    found = diagnose(fell(probes_before=probes() + probes(), probes_after=probes(-0.22, answers="other")))
    assert verdict(found) == ("target_replaced", "high", False)
    assert "the target itself changed" in fact(found, "probes")
    assert "retraining would hide it" in found.recommended_action


def test_steady_probes_and_moved_queries_are_query_drift_with_high_confidence() -> None:
    found = diagnose(
        fell(
            probes_before=probes() + probes(),
            probes_after=probes(),
            captures_before=CAPTURED_BEFORE,
            captures_after=OTHER_TOPIC,
        )
    )
    assert verdict(found) == ("query_drift", "high", True)
    assert found.missing == ()
    assert "a new topic" in fact(found, "queries")
    assert {example.rpartition("-")[0] for example in found.examples} == {"german-4"}


def test_queries_that_nobody_kept_are_not_said_to_be_steady() -> None:
    found = diagnose(fell(probes_before=probes() + probes(), probes_after=probes()))
    assert verdict(found) == ("query_drift", "medium", True)
    assert "the queries could not be compared" in found.reason


def test_queries_like_another_segment_are_named_so() -> None:
    like_code = captures(4, "german", 60, CODE)
    found = diagnose(fell(captures_before=CAPTURED_BEFORE, captures_after=like_code))
    assert "like code" in fact(found, "queries")
    assert "like code" in found.summary


def test_moved_queries_without_probes_are_query_drift_of_medium_confidence_and_still_retrain() -> None:
    found = diagnose(fell(captures_before=CAPTURED_BEFORE, captures_after=OTHER_TOPIC))
    assert verdict(found) == ("query_drift", "medium", True)
    assert any("canary probes" in gap for gap in found.missing)


def test_no_probes_and_no_captures_name_no_cause_and_retrain_nothing() -> None:
    found = diagnose(fell())
    assert verdict(found) == ("unknown", "low", False)
    assert "nothing tells the traffic from the machine" in found.reason
    assert any("canary probes" in gap for gap in found.missing)
    assert any("no captured requests" in gap for gap in found.missing)
    assert found.examples == ()


def test_too_few_probes_and_captures_name_no_cause_either() -> None:
    few = captures(4, "german", 5, LEGAL)
    found = diagnose(
        fell(
            probes_before=probes(prompts=5) * 2,
            probes_after=probes(prompts=5),
            captures_before=CAPTURED_BEFORE,
            captures_after=few,
        )
    )
    assert verdict(found) == ("unknown", "low", False)


def test_steady_probes_and_queries_as_before_are_no_query_drift() -> None:
    found = diagnose(
        fell(
            probes_before=probes() + probes(),
            probes_after=probes(),
            captures_before=CAPTURED_BEFORE,
            captures_after=SAME_TOPICS,
        )
    )
    assert verdict(found) == ("unknown", "low", False)
    assert "neither the queries nor the canary probes moved" in found.reason


def test_probes_that_certainly_moved_are_never_said_to_have_stayed() -> None:
    """By .05 at t = 5, and the traffic by .25: the interval excludes 0."""
    random = np.random.default_rng(8)
    shifts = random.normal(-0.05, 0.045, 20)
    after = tuple(
        replace(one, accepted=one.accepted + round(200 * shift))
        for one, shift in zip(probes(), shifts, strict=True)
    )
    found = diagnose(
        fell(
            probes_before=probes() + probes(),
            probes_after=after,
            captures_before=CAPTURED_BEFORE,
            captures_after=OTHER_TOPIC,
        )
    )
    numbers = next(one.numbers for one in found.facts if one.about == "probes")
    assert float(numbers["change_high"] or 0.0) < 0.0
    assert "did not" not in fact(found, "probes") + found.reason
    assert "moved, by less than the traffic" in fact(found, "probes")
    assert (found.cause, found.confidence) == ("query_drift", "medium")


def test_a_first_position_too_noisy_to_tell_does_not_make_another_k_certain() -> None:
    before = requests(1, {"german": 200}, {"german": 0.7}, first_rate=0.7)
    after = requests(2, {"german": 60}, {"german": 0.45}, k=8, first_rate=0.7)
    noisy = tuple(
        replace(one, first_accepted=(one.first_drafted or 0) * (number % 3 > 0))
        for number, one in enumerate(after[:12])
    )
    found = diagnose(fell(before=before, after=noisy))
    assert verdict(found) == ("configuration", "medium", False)
    assert "did not move" not in found.reason


def test_a_mix_is_not_the_only_cause_where_a_fall_inside_segments_is_not_excluded() -> None:
    rates = {"code": 0.85, "german": 0.45}
    found = diagnose(
        fell(
            changed=("code", "german"),
            before=requests(1, {"code": 9, "german": 3}, rates),
            after=requests(2, {"code": 5, "german": 7}, rates),
        )
    )
    assert found.cause != "mix_shift"
    assert "every segment is steady" not in found.reason


def test_queries_as_before_and_no_probes_is_not_called_drift() -> None:
    found = diagnose(fell(captures_before=CAPTURED_BEFORE, captures_after=SAME_TOPICS))
    assert verdict(found) == ("unknown", "low", False)
    assert "driftguard probe run --server SERVER" in found.recommended_action


def test_probes_not_replayed_since_the_change_are_awaited() -> None:
    found = diagnose(
        fell(
            probes_before=probes() + probes(),
            probes_awaited=True,
            captures_before=CAPTURED_BEFORE,
            captures_after=OTHER_TOPIC,
        )
    )
    assert (found.confidence, found.awaits_probes) == ("low", True)
    assert any("not been replayed" in gap for gap in found.missing)


@pytest.mark.parametrize("first_rate", [0.7, None])
def test_another_k_is_configuration_unless_position_one_fell_too(first_rate: float | None) -> None:
    before = requests(1, {"german": 200}, {"german": 0.7}, first_rate=0.7)
    after = requests(2, {"german": 60}, {"german": 0.45}, k=8, first_rate=first_rate)
    found = diagnose(fell(before=before, after=after))
    if first_rate is None:  # position 1 fell to .45 as well: not K alone
        assert (found.cause, found.confidence) == ("unknown", "low")
        assert "K (num_speculative_tokens) changed as well" in found.reason
    else:
        assert verdict(found) == ("configuration", "high", False)
        assert found.summary == "the configuration: K (num_speculative_tokens) went from 4 to 8"


QUERIES_MOVED = {
    "captures_before": CAPTURED_BEFORE,
    "captures_after": OTHER_TOPIC,
    "probes_before": probes() + probes(),
    "probes_after": probes(),
}


@pytest.mark.parametrize(
    ("old", "new", "first_rate", "expected"),
    [
        ("block", "token", 0.7, ("configuration", "high", False)),
        ("token", "block", 0.7, ("configuration", "high", False)),
        (
            "unknown",
            "block",
            0.7,
            ("configuration", "high", False),
        ),  # recorded before it was told: by rejection
        ("unknown", "token", 0.7, ("query_drift", "high", True)),  # which is the same
        ("block", "token", None, ("query_drift", "medium", True)),  # position 1 fell to .45 as well
        ("token", "tree", None, ("configuration", "medium", False)),  # whose first position is another
    ],
)
def test_another_verification_rule_is_configuration_unless_position_one_fell_too(
    old: str, new: str, first_rate: float | None, expected: tuple[str, str, bool]
) -> None:
    before = requests(1, {"german": 200}, {"german": 0.7}, first_rate=0.7, verification=old)
    after = requests(2, {"german": 60}, {"german": 0.45}, first_rate=first_rate, verification=new)
    assert verdict(diagnose(fell(before=before, after=after, **QUERIES_MOVED))) == expected


@pytest.mark.parametrize("greedy_tells", ["greedy", "unknown"])
def test_another_verification_rule_is_configuration_where_half_of_the_requests_are_greedy(
    greedy_tells: str,
) -> None:
    """Most are greedy on both sides, and these are verified as before."""
    before = greedy(1, 101, verification=greedy_tells)
    before += requests(2, {"german": 99}, {"german": 0.7}, first_rate=0.7, verification="block")
    after = greedy(3, 51, verification=greedy_tells)
    after += requests(4, {"german": 49}, {"german": 0.4}, first_rate=0.7, verification="token")
    found = diagnose(fell(before=before, after=after, **QUERIES_MOVED))
    assert verdict(found) == ("configuration", "high", False)
    assert found.summary == "the configuration: the verification rule went from block to token"


def test_more_greedy_requests_are_no_other_verification_rule() -> None:
    """Their share is told by the acceptance rule; that fell at the first position too."""
    hot = {"german": 0.5}
    before = greedy(1, 160) + requests(2, {"german": 40}, hot, verification="token")
    after = greedy(3, 20) + requests(4, {"german": 80}, hot, verification="token")
    found = diagnose(fell(before=before, after=after))
    assert (found.cause, found.retrain) == ("configuration", False)
    assert "the acceptance rule went from greedy to rejection" in found.summary
    assert "the verification rule" not in fact(found, "configuration")


def greedy(seed: int, count: int, verification: str = "greedy") -> tuple[Observed, ...]:
    drawn = requests(seed, {"german": count}, {"german": 0.7}, temperature=0.0, verification=verification)
    return tuple(replace(one, acceptance_rule="greedy") for one in drawn)


def test_k_no_longer_adapted_is_configuration() -> None:
    """Before, requests were judged by the first position; since, by all."""
    before = of_varying_k(1, 2, 0.7)
    after = requests(2, {"german": 60}, {"german": 0.5}, first_rate=0.7)
    found = diagnose(fell(before=before, after=after, **QUERIES_MOVED))
    assert (found.cause, found.retrain) == ("configuration", False)
    assert found.summary.endswith("K (num_speculative_tokens) went from not told to 4")


def test_k_adapted_now_is_configuration_unless_position_one_fell_too() -> None:
    before = requests(1, {"german": 200}, {"german": 0.8}, first_rate=0.7)
    found = diagnose(fell(before=before, after=of_varying_k(2, 7, 0.7), **QUERIES_MOVED))
    assert (found.cause, found.retrain) == ("configuration", False)
    assert found.summary.endswith("K (num_speculative_tokens) went from 4 to not told")
    assert diagnose(fell(before=before, after=of_varying_k(2, 7, 0.4))).cause != "configuration"


def test_k_that_is_only_told_now_is_no_other_k() -> None:
    """A proxy is started with the K that the server has had."""
    before = of_varying_k(1, 4, 0.7)
    after = requests(2, {"german": 60}, {"german": 0.5}, first_rate=0.7)
    found = diagnose(fell(before=before, after=after, **QUERIES_MOVED))
    assert found.cause != "configuration"
    assert "K (num_speculative_tokens)" not in fact(found, "configuration")
    assert any("K (num_speculative_tokens)" in gap for gap in found.missing)


def test_a_hotter_share_of_the_requests_is_configuration_with_the_temperature_named() -> None:
    cool, hot = {"german": 0.7}, {"german": 0.3}
    before = requests(1, {"german": 180}, cool, temperature=0.0)
    before += requests(2, {"german": 60}, hot, temperature=1.0)
    after = requests(3, {"german": 30}, cool, temperature=0.0)
    after += requests(4, {"german": 90}, hot, temperature=1.0)
    found = diagnose(fell(before=before, after=after))
    assert (found.cause, found.retrain) == ("configuration", False)
    assert "the sampling temperature" in found.summary
    steady = diagnose(
        fell(
            before=before,
            after=after,
            probes_before=probes() + probes(),
            probes_after=probes(),
            captures_before=CAPTURED_BEFORE,
            captures_after=SAME_TOPICS,
        )
    )
    assert steady.confidence == "high"


def test_more_load_at_the_same_moment_does_not_hide_a_drift() -> None:
    """Acceptance fell at every concurrency, so the load is told and not blamed."""
    after = requests(2, {"german": 30}, FALLEN, concurrency=4)
    after += requests(3, {"german": 60}, FALLEN, concurrency=16)
    found = diagnose(
        fell(
            before=BEFORE + requests(4, {"german": 40}, {"german": 0.7}, concurrency=16),
            after=after,
            captures_before=CAPTURED_BEFORE,
            captures_after=OTHER_TOPIC,
        )
    )
    assert found.cause == "query_drift"


def test_load_that_leaves_nothing_to_compare_is_not_taken_for_a_cause_of_moved_queries() -> None:
    after = requests(2, {"code": 60, "german": 60}, FALLEN, concurrency=16)
    found = diagnose(fell(after=after, captures_before=CAPTURED_BEFORE, captures_after=OTHER_TOPIC))
    assert found.cause == "query_drift"
    assert "the concurrency went from 4 to 7 to 16 to 31" in fact(found, "configuration")


def test_shares_that_move_are_told_as_mix_and_retrain_nothing() -> None:
    rates = {"code": 0.85, "german": 0.45}
    found = diagnose(
        fell(
            changed=("code", "german"),
            before=requests(1, {"code": 300, "german": 100}, rates),
            after=requests(2, {"code": 60, "german": 240}, rates),
        )
    )
    assert verdict(found) == ("mix_shift", "high", False)
    assert "by the mix of segments" in fact(found, "mix")


def test_another_target_calls_for_a_retraining_against_it() -> None:
    found = diagnose(fell(replaced_target="llama-70b"))
    assert verdict(found) == ("target_replaced", "high", True)
    assert "llama-70b" in found.summary


def risen(**more: object) -> Diagnosis:
    after = requests(2, {"code": 60, "german": 60}, {"code": 0.75, "german": 0.95})
    return diagnose(fell(**{"direction": "up", "after": after, **more}))


def test_a_rise_with_answers_that_repeat_themselves_is_a_question_of_quality() -> None:
    looping = captures(4, "german", 60, GERMAN, output=[7, 8, 9] * 20)
    found = risen(captures_before=CAPTURED_BEFORE, captures_after=looping)
    assert verdict(found) == ("quality", "high", False)
    assert "read some answers" in found.recommended_action


def test_a_rise_never_retrains() -> None:
    assert not risen(captures_before=CAPTURED_BEFORE, captures_after=OTHER_TOPIC).retrain
    assert not risen().retrain
    assert not risen(probes_before=probes() + probes(), probes_after=probes(0.1)).retrain


def test_nothing_known_at_all_still_answers() -> None:
    found = diagnose(fell(before=(), after=()))
    assert found.facts == ()
    assert found.confidence != "high"


def test_the_same_evidence_gives_the_same_diagnosis() -> None:
    evidence = fell(
        before=BEFORE, probes_before=probes(), captures_before=CAPTURED_BEFORE, captures_after=OTHER_TOPIC
    )
    assert diagnose(evidence) == diagnose(evidence)


def of_varying_k(seed: int, k: int, first_rate: float) -> tuple[Observed, ...]:
    """K is not told. What all positions accept is as before at any K, as where K follows acceptance."""
    found = requests(seed, COUNTS, {"code": 0.5, "german": 0.5}, k=k, first_rate=first_rate)
    return tuple(replace(one, num_speculative_tokens=None, by_first=True) for one in found)


def test_a_k_that_followed_acceptance_never_explains_what_the_first_position_lost() -> None:
    before, after = of_varying_k(1, 5, 0.8), of_varying_k(2, 2, 0.6)
    found = diagnose(
        fell(before=before, after=after, captures_before=CAPTURED_BEFORE, captures_after=OTHER_TOPIC)
    )
    assert (found.cause, found.retrain) == ("query_drift", True)
    assert found.reason.startswith("acceptance of the first draft token fell inside segments")
    assert "drafted tokens per step went from 5 to 2" in fact(found, "configuration")
    assert "does not depend on it" in fact(found, "configuration")
    assert not any("K (num_speculative_tokens)" in text for text in found.missing)
    moved = diagnose(
        fell(before=before, after=after, probes_before=probes() + probes(), probes_after=probes(-0.22))
    )
    assert (moved.cause, moved.confidence) == ("machine", "medium")
    assert "so did K" in moved.reason


def test_the_share_of_requests_that_are_judged_otherwise_is_mix() -> None:
    """Adaptive K was switched on: what all positions accept and what the first does are not compared."""
    fixed = requests(3, COUNTS, {"code": 0.5, "german": 0.5})
    found = diagnose(fell(before=fixed, after=of_varying_k(4, 4, 0.8)))
    assert "+0.000 inside them" in fact(found, "mix")


def test_prompts_that_nearly_moved_are_not_said_to_look_as_before() -> None:
    """A fourth of them is new: at 2.5% that is no proof of a move, and less of none."""
    steady = {"probes_before": probes() * 2, "probes_after": probes()}

    def since(new: int) -> Diagnosis:
        now = captures(4, "german", 60 - new, GERMAN) + captures(54, "german", new, LEGAL)
        return diagnose(fell(captures_before=CAPTURED_BEFORE, captures_after=now, **steady))

    assert (since(0).cause, since(0).retrain) == ("unknown", False)
    nearly = since(14)
    assert (nearly.cause, nearly.confidence, nearly.retrain) == ("query_drift", "medium", True)
    (text,) = (one.text for one in nearly.facts if one.about == "queries")
    assert "show no move, but do not exclude one (p = 0.025" in text
    assert (since(20).cause, since(20).confidence) == ("query_drift", "high")
