"""What holds of every diagnosis, whatever the evidence: found by hypothesis, not by examples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from hypothesis import given, settings
from hypothesis import strategies as st

from driftguard.diagnosis import CONFIDENCES, Captured, Diagnosis, Evidence, diagnose
from driftguard.diagnosis.examination import examine
from driftguard.records.documents.serving_scores import ServingScores
from driftguard.retraining.due import why_not
from tests.diagnosis.cases import CODE, GERMAN, LEGAL, captures, probes, requests
from tests.diagnosis.scores import scores

ENGINE: Final = ("machine", "engine_state", "cache", "draft_wrong", "template", "load")
NONE: Final[dict[str, Any]] = {"probes_before": (), "probes_after": ()}
seeds = st.integers(0, 10_000)


@st.composite
def traffic(draw: st.DrawFn) -> dict[str, Any]:
    """A fall, or none, of one or both segments; sometimes with another K, temperature or mix."""
    levels = {"code": draw(st.floats(0.3, 0.9)), "german": draw(st.floats(0.3, 0.9))}
    fall = draw(st.floats(0.0, 0.6))
    changed = draw(st.sampled_from([("german",), ("code",), ("code", "german")]))
    now = {name: max(level - fall * (name in changed), 0.02) for name, level in levels.items()}
    counts = {"code": draw(st.integers(5, 120)), "german": draw(st.integers(5, 120))}
    more = draw(st.sampled_from([{}, {}, {"k": 6}, {"temperature": 0.0}, {"concurrency": 40}]))
    return {
        "direction": draw(st.sampled_from(["down", "down", "up"])),
        "changed": changed,
        "before": requests(draw(seeds), {"code": 150, "german": 150}, levels),
        "after": requests(draw(seeds), counts, now, **more),  # type: ignore[arg-type]
    }


@st.composite
def replays(draw: st.DrawFn) -> dict[str, Any]:
    """No probes, few, or enough; steady, or moved by anything."""
    count = draw(st.sampled_from([0, 5, 12, 20]))
    if not count:
        return dict(NONE)
    shift, answers = draw(st.floats(-0.4, 0.1)), draw(st.sampled_from(["same", "same", "other"]))
    return {
        "probes_before": probes(prompts=count) * 2,
        "probes_after": probes(shift, prompts=count, answers=answers),
    }


def counted(side: tuple[Captured, ...], rate: float) -> tuple[Captured, ...]:
    return tuple(replace(one, drafted=200, accepted=round(200 * rate) - n % 5) for n, one in enumerate(side))


@st.composite
def captured(draw: st.DrawFn) -> dict[str, Any]:
    """No captures, or of the same or another topic, with or without the counts of their records."""
    count = draw(st.sampled_from([0, 8, 60]))
    topics = [draw(st.sampled_from([CODE, LEGAL])), draw(st.sampled_from([GERMAN, LEGAL]))]
    old = captures(draw(seeds), "code", count, CODE) + captures(draw(seeds), "german", count, GERMAN)
    new = captures(draw(seeds), "code", count, topics[0]) + captures(draw(seeds), "german", count, topics[1])
    if draw(st.booleans()):
        old, new = counted(old, 0.7), counted(new, draw(st.floats(0.1, 0.7)))
    return {"captures_before": old, "captures_after": new}


@st.composite
def like_before(draw: st.DrawFn) -> dict[str, Any]:
    """Captures of the same topics that are accepted as before."""
    sides = [
        captures(draw(seeds), "code", 60, CODE) + captures(draw(seeds), "german", 60, GERMAN) for _ in "01"
    ]
    return {"captures_before": counted(sides[0], 0.7), "captures_after": counted(sides[1], 0.7)}


@st.composite
def scorings(draw: st.DrawFn) -> ServingScores | None:
    """None, or any levels of served and offline acceptance since the change, and any surprise; by one rule or
    both."""
    if draw(st.booleans()):
        return None
    served, surprise = draw(st.floats(0.05, 0.9)), draw(st.floats(-0.1, 0.5))
    error = draw(st.sampled_from([0.005, 0.01, 0.05, 0.2]))
    by_rules = [
        scores(served, draw(st.floats(0.05, 0.9)), surprise, error=error, segments=("code", "german"))
        for _ in range(draw(st.integers(1, 2)))
    ]
    return ServingScores(by_rules[0].segments, by_rules[1].segments if len(by_rules) > 1 else ())


def certainty(found: Diagnosis, *causes: str) -> int:
    """0: not named; else 1 to 3 by confidence."""
    return 1 + CONFIDENCES.index(found.confidence) if found.cause in causes else 0


def retrains(found: Diagnosis) -> bool:
    return why_not(found, "medium") is None


@settings(max_examples=60, deadline=None)
@given(traffic(), replays(), captured(), scorings(), st.booleans(), st.sampled_from([None, "llama-3"]))
def test_low_confidence_and_faults_of_the_engine_never_retrain(
    of: dict[str, Any],
    probed: dict[str, Any],
    kept: dict[str, Any],
    scored: ServingScores | None,
    awaited: bool,
    target: str | None,
) -> None:
    evidence = Evidence(**of, **probed, **kept, scores=scored, probes_awaited=awaited, replaced_target=target)
    found = diagnose(evidence)
    if found.confidence == "low" or found.cause in (*ENGINE, "unknown", "mix_shift", "configuration"):
        assert not found.retrain
        assert not retrains(found)
    if found.retrain:
        assert found.cause == "query_drift" or (found.cause == "target_replaced" and target is not None)
        assert evidence.direction == "down"


@settings(max_examples=40, deadline=None)
@given(traffic(), captured(), st.floats(0.5, 1.0))
def test_probes_that_fell_with_the_traffic_never_make_query_drift_more_certain(
    of: dict[str, Any], kept: dict[str, Any], share: float
) -> None:
    without = diagnose(Evidence(**of, **kept))
    fell: dict[str, Any] = {"probes_before": probes() * 2, "probes_after": probes(-0.6 * share)}
    found = diagnose(Evidence(**of, **kept, **fell))
    assert certainty(found, "query_drift") <= certainty(without, "query_drift")
    if of["direction"] == "down":
        assert not retrains(found)


@settings(max_examples=40, deadline=None)
@given(traffic(), captured())
def test_steady_probes_never_make_a_fault_of_the_engine_more_certain(
    of: dict[str, Any], kept: dict[str, Any]
) -> None:
    without = diagnose(Evidence(**of, **kept))
    steady = probes()
    found = diagnose(Evidence(**of, **kept, probes_before=steady * 2, probes_after=steady))
    for cause in ENGINE:
        assert certainty(found, cause) <= certainty(without, cause)


@settings(max_examples=40, deadline=None)
@given(traffic(), replays(), seeds)
def test_captures_of_the_same_topics_that_fell_as_well_never_make_query_drift_more_certain(
    of: dict[str, Any], probed: dict[str, Any], seed: int
) -> None:
    """At 1% they look moved by chance; as they are like those before and fell too, nobody retrains."""
    without = diagnose(Evidence(**of, **probed))
    old = counted(captures(seed, "code", 60, CODE) + captures(seed + 1, "german", 60, GERMAN), 0.9)
    new = counted(captures(seed + 2, "code", 60, CODE) + captures(seed + 3, "german", 60, GERMAN), 0.1)
    found = diagnose(Evidence(**of, **probed, captures_before=old, captures_after=new))
    assert certainty(found, "query_drift") <= certainty(without, "query_drift")
    if of["direction"] == "down":
        assert not retrains(found)


@settings(max_examples=40, deadline=None)
@given(traffic(), replays(), captured(), st.floats(0.5, 1.0))
def test_a_gap_that_opened_never_makes_query_drift_more_certain_and_never_retrains(
    of: dict[str, Any], probed: dict[str, Any], kept: dict[str, Any], share: float
) -> None:
    without = diagnose(Evidence(**of, **probed, **kept))
    opened = scores(0.7 - 0.7 * share, 0.71, segments=("code", "german"))
    found = diagnose(Evidence(**of, **probed, **kept, scores=opened))
    assert certainty(found, "query_drift") <= certainty(without, "query_drift")
    if of["direction"] == "down" and found.retrain:  # only of a fall that is not shown, which scores leave
        assert retrains(without)


@settings(max_examples=40, deadline=None)
@given(traffic(), replays(), captured(), st.floats(0.05, 0.7))
def test_a_fall_that_the_models_account_for_never_makes_a_fault_of_the_engine_more_certain(
    of: dict[str, Any], probed: dict[str, Any], kept: dict[str, Any], level: float
) -> None:
    without = diagnose(Evidence(**of, **probed, **kept))
    accounted = scores(level, level + 0.01, segments=("code", "german"))
    found = diagnose(Evidence(**of, **probed, **kept, scores=accounted))
    for cause in ENGINE:
        assert certainty(found, cause) <= certainty(without, cause)


@settings(max_examples=40, deadline=None)
@given(traffic(), replays(), captured(), st.floats(0.15, 1.0))
def test_answers_of_another_target_never_retrain(
    of: dict[str, Any], probed: dict[str, Any], kept: dict[str, Any], surprise: float
) -> None:
    other = scores(0.4, 0.4, surprise, segments=("code", "german"))
    found = diagnose(Evidence(**of, **probed, **kept, scores=other))
    assert not found.retrain


@settings(max_examples=60, deadline=None)
@given(traffic(), replays(), captured() | like_before(), st.sampled_from([0.005, 0.01, 0.02]))
def test_scores_that_account_for_the_fall_never_take_a_retraining_away(
    of: dict[str, Any], probed: dict[str, Any], kept: dict[str, Any], error: float
) -> None:
    """More evidence of a true drift never makes it less certain."""
    evidence = Evidence(**of, **probed, **kept)
    without = diagnose(evidence)
    move = examine(evidence).move
    accounted = scores(0.7 + move, 0.71 + move, error=error, segments=("code", "german"))
    found = diagnose(replace(evidence, scores=accounted))
    if retrains(without):
        assert retrains(found)
    if of["direction"] == "down":
        assert certainty(found, "query_drift") >= certainty(without, "query_drift")


@settings(max_examples=40, deadline=None)
@given(traffic(), replays(), captured(), st.booleans())
def test_a_gap_that_is_open_by_one_of_the_rules_that_an_engine_may_have_tells_nothing(
    of: dict[str, Any], probed: dict[str, Any], kept: dict[str, Any], by_match: bool
) -> None:
    """It may be no more than the difference of the rules; and no less than a fault."""
    evidence = Evidence(**of, **probed, **kept)
    without = diagnose(evidence)
    move = examine(evidence).move
    rules = [
        scores(0.7 + move, 0.71 + offline, segments=("code", "german")).segments for offline in (0.0, move)
    ]
    told = ServingScores(*(rules[::-1] if by_match else rules))
    found = diagnose(replace(evidence, scores=told))
    assert (found.cause, found.confidence, found.retrain) == (
        without.cause,
        without.confidence,
        without.retrain,
    )
