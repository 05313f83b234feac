"""Many segments of which most are rare: every number of a diagnosis can be stored as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftguard.diagnosis import Diagnosis, Evidence, Observed, ProbeResult, diagnose
from driftguard.diagnosis.comparisons import decompose, difference, rate_of
from tests.diagnosis.cases import captures, requests


def as_json(diagnosis: Diagnosis) -> str:
    """Raises ValueError for a number that is infinite or none at all, as PostgreSQL does."""
    return json.dumps(msgspec.to_builtins(diagnosis), allow_nan=False)


def test_one_request_of_a_rare_segment_since_the_change_leaves_a_diagnosis_that_can_be_stored() -> None:
    rates = {"chat": 0.75, "rare": 0.75}
    before = requests(1, {"chat": 990, "rare": 10}, rates)
    after = requests(2, {"chat": 59, "rare": 1}, {"chat": 0.40, "rare": 0.40})
    diagnosis = diagnose(Evidence("down", ("chat",), before, after))
    assert (diagnosis.cause, diagnosis.confidence) == ("unknown", "low")
    as_json(diagnosis)


@pytest.mark.parametrize("segments", [8, 20])
def test_segments_of_zipf_shares_are_diagnosed_at_any_drop(segments: int) -> None:
    names = [f"s{rank}" for rank in range(1, segments + 1)]
    shares = 1.0 / np.arange(1, segments + 1)
    for seed in range(10):
        random = np.random.default_rng(seed)
        sides = [
            requests(
                seed + 100 * side,
                dict(zip(names, random.multinomial(count, shares / shares.sum()).tolist(), strict=True)),
                dict.fromkeys(names, rate),
            )
            for side, count, rate in ((0, 1_000, 0.75), (1, 60, 0.65))
        ]
        diagnosis = diagnose(Evidence("down", tuple(names), sides[0], sides[1]))
        assert (diagnosis.cause, diagnosis.confidence) == ("unknown", "low")
        as_json(diagnosis)


def test_a_single_request_says_nothing_by_itself_and_little_among_many() -> None:
    one, many = rate_of([(10, 9)]), rate_of([(10, 4), (10, 6)] * 100)
    assert one is not None
    assert many is not None
    alone = difference(many, one)
    assert (alone.low, alone.high, alone.p_value) == (-1.0, 1.0, 1.0)
    parts = decompose({"chat": many, "rare": many}, {"chat": many, "rare": one})
    assert parts is not None
    # Of the rare segment nothing better is known than that a rate lies between 0 and 1.
    share = (many.drafted / (2 * many.drafted) + one.drafted / (many.drafted + one.drafted)) / 2
    assert share / 2 <= parts.within_error < share / 2 + 0.02


counts = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (max(pair), min(pair)))


@st.composite
def observed(draw: st.DrawFn) -> Observed:
    """Anything that a record may say: nothing drafted, all accepted, settings told or not."""
    steps = draw(st.integers(1, 30))
    drafted, accepted = draw(counts)
    by_first = draw(st.booleans())
    first = draw(st.integers(0, steps))
    return Observed(
        segment=draw(st.sampled_from(["a", "b", "c", "d"])),
        steps=steps,
        drafted=drafted,
        accepted=accepted,
        num_speculative_tokens=draw(st.sampled_from([None, 1, 4])),
        acceptance_rule=draw(st.sampled_from(["unknown", "rejection", "typical"])),
        temperature=draw(st.sampled_from([None, 0.0, 0.7, 2.0])),
        concurrency=draw(st.sampled_from([None, 0, 1, 9])),
        first_drafted=steps if by_first else None,
        first_accepted=first if by_first else None,
        by_first=by_first,
    )


probed = st.builds(
    lambda prompt, pair: ProbeResult(prompt, "answer", *pair), st.sampled_from("abcdefghijk"), counts
)
sides = st.lists(observed(), max_size=25).map(tuple)
replays = st.lists(probed, max_size=15).map(tuple)


@given(sides, sides, replays, replays, st.sampled_from(["down", "up"]), st.booleans())
def test_every_number_is_finite_whatever_the_records_say(
    before: tuple[Observed, ...],
    after: tuple[Observed, ...],
    probes_before: tuple[ProbeResult, ...],
    probes_after: tuple[ProbeResult, ...],
    direction: str,
    replaced: bool,
) -> None:
    evidence = Evidence(
        direction="up" if direction == "up" else "down",
        changed=("a", "b"),
        before=before,
        after=after,
        probes_before=probes_before,
        probes_after=probes_after,
        replaced_target="target" if replaced else None,
    )
    as_json(diagnose(evidence))


@given(st.lists(st.lists(st.integers(0, 3), max_size=20), min_size=10, max_size=12))
def test_every_number_is_finite_whatever_was_captured(prompts: list[list[int]]) -> None:
    before = captures(1, "a", len(prompts), (0, 5), output=[1] * 20)
    after = tuple(replace(one, prompt=tuple(ids)) for one, ids in zip(before, prompts, strict=True))
    as_json(diagnose(Evidence("up", ("a",), (), (), captures_before=before, captures_after=after)))
