"""Scored captures: an engine that does not serve its models faithfully is told from traffic that fits the
draft less, and from another target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from driftguard.diagnosis import Captured, Diagnosis, diagnose
from driftguard.diagnosis.serving_gap import Expected, ScoredRequest, compare, summarised
from driftguard.records.documents.serving_scores import (
    MissingScores,
    Rule,
    SegmentScores,
    ServingScores,
    SideScores,
)
from tests.diagnosis.cases import (
    CAPTURED_BEFORE,
    CODE,
    GERMAN,
    LEGAL,
    SEGMENTS,
    captures,
    fell,
    probes,
    requests,
)
from tests.diagnosis.scores import ACCOUNTED, OPENED, OTHER_TARGET, scores

STEADY: dict[str, Any] = {"probes_before": probes() * 2, "probes_after": probes()}
MOVED: dict[str, Any] = {
    "captures_before": CAPTURED_BEFORE,
    "captures_after": captures(3, "german", 60, LEGAL),
}
BOTH: dict[str, Any] = {  # position 1 falls in every segment
    "changed": SEGMENTS,
    "after": requests(2, {"code": 60, "german": 60}, {"code": 0.5, "german": 0.45}),
}


def verdict(found: Diagnosis) -> tuple[str, str, bool]:
    return found.cause, found.confidence, found.retrain


def test_a_gap_that_opened_is_the_engine_whatever_the_queries_did() -> None:
    found = diagnose(fell(scores=OPENED, **MOVED))
    assert verdict(diagnose(fell(**MOVED))) == ("query_drift", "medium", True)
    assert verdict(found) == ("machine", "high", False)
    assert "less than target and draft account for" in found.reason
    (fact,) = (one.text for one in found.facts if one.about == "serving gap")
    assert fact.startswith(
        "the serving gap opened: of captured requests the server accepted 0.70 before and 0.45 since, target "
        "and draft account for 0.71 and 0.71 (60 and 60 scored; change of the gap -0.29 to -0.21 at 99%)"
    )


def test_one_that_opened_at_position_1_everywhere_is_the_draft_that_runs() -> None:
    found = diagnose(fell(scores=scores(0.47, 0.71, segments=SEGMENTS), **BOTH))
    assert verdict(found) == ("draft_wrong", "medium", False)


def test_steady_probes_that_ask_what_the_traffic_asks_make_it_less_sure() -> None:
    assert verdict(diagnose(fell(scores=OPENED, **STEADY))) == ("machine", "medium", False)


def test_a_fall_that_the_models_account_for_is_the_traffic() -> None:
    assert verdict(diagnose(fell())) == ("unknown", "low", False)
    found = diagnose(fell(scores=ACCOUNTED))
    assert verdict(found) == ("query_drift", "medium", True)
    assert "target and draft account for it: offline 0.71 before, 0.46 since" in found.reason
    assert verdict(diagnose(fell(scores=ACCOUNTED, **STEADY))) == ("query_drift", "high", True)
    assert verdict(diagnose(fell(scores=ACCOUNTED, **MOVED))) == ("query_drift", "medium", True)


def test_the_scores_of_a_segment_that_is_back_do_not_count() -> None:
    back = replace(scores(0.7, 0.71).segments[0], segment="code")
    assert verdict(diagnose(fell(scores=ServingScores((*OPENED.segments, back))))) == verdict(
        diagnose(fell(scores=OPENED))
    )
    both = ServingScores((*ACCOUNTED.segments, back))
    assert verdict(diagnose(fell(scores=both))) == ("query_drift", "medium", True)


def test_it_need_not_wait_for_probes() -> None:
    awaited = {"probes_before": probes() * 2, "probes_awaited": True}
    found = diagnose(fell(scores=ACCOUNTED, **awaited))
    assert (*verdict(found), found.awaits_probes) == ("query_drift", "medium", True, True)


@pytest.mark.parametrize(
    "contradicting",
    [
        {"after": requests(2, {"code": 60, "german": 60}, {"code": 0.75, "german": 0.45}, concurrency=40)},
        {"probes_before": probes() * 2, "probes_after": probes(-0.25)},
        {"scores": scores(0.45, 0.46, 0.15)},  # it may be another target as well
        {"scores": scores(0.45, 0.46, error=0.1)},
        {"scores": scores(0.45, 0.71, error=0.1)},
    ],
    ids=["a setting", "probes", "surprise", "noise", "a noisy gap"],
)
def test_what_contradicts_it_retrains_nothing(contradicting: dict[str, Any]) -> None:
    found = diagnose(fell(**{"scores": ACCOUNTED, **contradicting}))
    assert not found.retrain


def test_prompts_that_look_as_before_do_not_contradict_what_the_models_make_of_them() -> None:
    """Their n-grams are alike; offline the draft fits them less all the same, and the engine is excluded."""
    alike: dict[str, Any] = {
        "captures_before": CAPTURED_BEFORE,
        "captures_after": captures(4, "german", 60, GERMAN) + captures(5, "code", 60, CODE),
    }
    assert verdict(diagnose(fell(**alike, **STEADY))) == ("unknown", "low", False)
    for probed in ({}, STEADY):
        found = diagnose(fell(scores=ACCOUNTED, **alike, **probed))
        assert verdict(found) == ("query_drift", "medium", True)
        assert "though captured prompts look as before" in found.reason


def with_surprise(change: float, error: float) -> ServingScores:
    """A fall that the models account for; the answers are too few to tell much of their target."""

    def surprised(one: SideScores, surprise: float) -> SideScores:
        return replace(one, surprise=surprise, surprise_error=error)

    (of,) = ACCOUNTED.segments
    return ServingScores((SegmentScores(of.segment, surprised(of.before, 0.0), surprised(of.after, change)),))


def test_answers_too_few_to_exclude_another_target_make_it_less_sure_and_no_more() -> None:
    """One that accepts otherwise would open the gap."""
    few = {**STEADY, "probes_after": probes(prompts=20, answers="new each time")}
    few["probes_before"] = (*probes(), *probes(answers="other"))  # no prompt is answered alike each time
    assert verdict(diagnose(fell(scores=with_surprise(0.03, 0.08)))) == ("query_drift", "medium", True)
    assert verdict(diagnose(fell(scores=with_surprise(0.03, 0.01), **few))) == ("query_drift", "high", True)
    assert verdict(diagnose(fell(scores=with_surprise(0.03, 0.08), **few))) == ("query_drift", "medium", True)
    assert not diagnose(fell(scores=with_surprise(0.15, 0.03))).retrain


def test_the_fall_of_all_requests_less_that_of_the_gap_is_what_the_models_account_for() -> None:
    """Few were scored, and differ: their own fall is not shown at 1%; that of all requests is."""

    def noisy(one: SideScores, offline: float) -> SideScores:
        return replace(one, offline=offline, offline_error=0.08)

    (of,) = ACCOUNTED.segments

    def told(offline: float) -> ServingScores:
        return ServingScores((SegmentScores(of.segment, noisy(of.before, 0.71), noisy(of.after, offline)),))

    assert verdict(diagnose(fell(scores=told(0.46)))) == ("query_drift", "medium", True)
    assert verdict(diagnose(fell(scores=told(0.98)))) == ("unknown", "low", False)  # these did not fall


def test_answers_that_surprise_the_target_are_anothers() -> None:
    found = diagnose(fell(scores=OTHER_TARGET, **MOVED))
    assert verdict(found) == ("target_replaced", "medium", False)
    assert "roll it back or announce it" in found.recommended_action
    assert "0.30 nats per token more than before" in found.reason


def test_probes_that_are_answered_alike_contradict_another_target() -> None:
    found = diagnose(fell(scores=OTHER_TARGET, **MOVED, **STEADY))
    assert verdict(found) == ("unknown", "low", False)
    assert "though canary probes are answered alike" in found.reason


def test_where_they_may_be_anothers_an_open_gap_is_not_sure() -> None:
    found = diagnose(fell(scores=scores(0.45, 0.71, 0.095)))
    assert verdict(found) == ("machine", "medium", False)


def test_a_gap_of_the_engines_own_rule_says_nothing_as_it_is_there_before_too() -> None:
    """Such as drafts that are not sampled: .70 is served where the models account for .80."""
    found = compare(scores(0.45, 0.46), ["german"])
    assert found is not None
    assert (found.behaviour(-0.25), found.behaviour(-0.01)) == ("steady", "unclear")


@pytest.mark.parametrize("code", get_args(MissingScores))
def test_why_there_are_no_scores_is_said_and_the_incident_diagnosed_all_the_same(code: MissingScores) -> None:
    found = diagnose(fell(missing_scores=code, **MOVED))
    assert verdict(found) == verdict(diagnose(fell(**MOVED)))
    (told,) = (one for one in found.missing if one.startswith("captured requests could not be scored: "))
    assert len(told) > 60


def scored(seed: int, count: int, gap: float, *, turns: int = 1) -> list[ScoredRequest]:
    """Requests whose acceptance differs (sd .15), of which the engine accepts by `gap` less; turns of one
    conversation are the same request."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        rate = float(np.clip(random.normal(0.7, 0.15), 0.1, 0.95))
        accepted = int(random.binomial(80, max(rate - gap, 0.0)))
        surprise = float(random.normal(0, 5))
        for turn in range(turns):
            session = f"s{number}" if turns > 1 else None
            one = Captured(
                f"{number}-{turn}", "german", (number, turn), (1, 2), session, drafted=80, accepted=accepted
            )
            by = Expected(80.0, 80.0 * rate, 80.0 * rate)
            found.append(ScoredRequest(one, by, by, surprise, 60))
    return found


def test_the_gap_is_told_more_sharply_than_acceptance_as_the_requests_are_the_same() -> None:
    found = summarised(scored(1, 60, 0.0), scored(2, 60, 0.08), ("german",), "rejection")
    assert found is not None
    gap = compare(found, ["german"])
    assert gap is not None
    side = found.segments[0].after
    assert side.gap_error < side.served_error / 2
    assert gap.opened.high < 0.0
    assert gap.opened.low < -0.08 < gap.opened.high


def test_its_interval_covers_what_is_true_at_its_level() -> None:
    covered = 0
    for seed in range(200):
        found = summarised(scored(seed, 40, 0.0), scored(seed + 1_000, 40, 0.1), ("german",), "rejection")
        assert found is not None
        gap = compare(found, ["german"])
        assert gap is not None
        covered += gap.opened.low <= -0.1 <= gap.opened.high
    assert covered >= 193  # 99% of 200, and what a binomial falls below once in a hundred


def test_turns_of_one_conversation_are_one_unit() -> None:
    once = summarised(scored(1, 30, 0.0), scored(2, 30, 0.0), ("german",), "rejection")
    thrice = summarised(scored(1, 30, 0.0, turns=3), scored(2, 30, 0.0, turns=3), ("german",), "rejection")
    assert once is not None
    assert thrice is not None
    assert thrice.segments[0].after.units == 30
    assert thrice.segments[0].after.gap_error == pytest.approx(once.segments[0].after.gap_error)


def test_fewer_than_ten_of_a_segment_on_one_side_are_no_scores() -> None:
    assert summarised(scored(1, 60, 0.0), scored(2, 9, 0.0), ("german",), "rejection") is None


def by_rules(rejection: ServingScores, match: ServingScores) -> ServingScores:
    """Of an engine whose rule nobody tells."""
    return ServingScores(rejection.segments, match.segments)


def test_where_the_rule_is_not_known_a_gap_counts_that_is_open_by_both() -> None:
    """New text of more entropy: a draft that guesses by argmax is kept less often than one that samples."""
    only_one = by_rules(OPENED, ACCOUNTED)
    assert verdict(diagnose(fell(scores=OPENED))) == ("machine", "high", False)
    found = diagnose(fell(scores=only_one, **MOVED))
    assert verdict(found) == verdict(diagnose(fell(**MOVED)))
    assert any("engines.acceptance_rule" in one for one in found.missing)
    (fact,) = (one.text for one in found.facts if one.about == "serving gap")
    assert fact.startswith("the serving gap depends on the rule of the engine, which is not known: ")
    assert "by rejection sampling, or for 0.71 and 0.46 if the likeliest token is drafted" in fact
    assert verdict(diagnose(fell(scores=by_rules(OPENED, OPENED)))) == ("machine", "high", False)
    assert verdict(diagnose(fell(scores=by_rules(ACCOUNTED, ACCOUNTED)))) == ("query_drift", "medium", True)
    assert verdict(diagnose(fell(scores=by_rules(ACCOUNTED, OPENED)))) == ("unknown", "low", False)


def test_an_engine_of_a_known_rule_is_scored_by_it_alone() -> None:
    def of_match(seed: int, rate: float) -> list[ScoredRequest]:
        return [replace(one, match=Expected(80.0, 80.0 * rate, 80.0 * rate)) for one in scored(seed, 30, 0.0)]

    before, after = of_match(1, 0.4), of_match(2, 0.2)
    known = {rule: summarised(before, after, ("german",), rule) for rule in get_args(Rule)}
    unknown = summarised(before, after, ("german",), None)
    assert known["match"] is not None
    assert known["rejection"] is not None
    assert unknown is not None
    (of,) = known["match"].segments
    assert of.before.offline == pytest.approx(0.4)
    assert of.after.offline == pytest.approx(0.2)
    assert known["match"].by_match == known["rejection"].by_match == ()
    assert unknown == ServingScores(known["rejection"].segments, known["match"].segments)
