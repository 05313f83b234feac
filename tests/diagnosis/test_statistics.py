"""Levels and identities of the tests under a diagnosis, checked by simulation with fixed seeds."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, mannwhitneyu

from driftguard.diagnosis import ProbeResult, captured_requests, comparisons, configuration, probes
from driftguard.diagnosis.captured_requests import features_of, repetition_rate
from driftguard.diagnosis.comparisons import LARGEST_ERROR, Rate, difference, rate_of
from driftguard.diagnosis.probes import sign_flip_p_value
from tests.diagnosis.cases import CODE, captures, requests
from tests.diagnosis.cases import probes as replay


def most_rejections(runs: int, level: float) -> int:
    """Exceeded with probability 0.001 by a test that holds its level."""
    return int(binom.ppf(0.999, runs, level))


rates = st.builds(Rate, st.integers(2, 50), st.integers(1, 10_000), st.floats(0, 1), st.floats(0, 0.1))
sides = st.dictionaries(st.sampled_from("abcde"), rates, min_size=1)


@settings(max_examples=60, deadline=None)
@given(sides, sides)
def test_mix_and_within_add_up_to_the_move_exactly(before: dict[str, Rate], after: dict[str, Rate]) -> None:
    parts = comparisons.decompose(before, after)
    assert parts is not None
    assert parts.mix + parts.within == pytest.approx(parts.after - parts.before, abs=1e-12)
    assert 0 <= parts.overlap <= 1 + 1e-12
    if not before.keys() & after.keys():
        assert (parts.within, parts.overlap) == (0, 0)


def test_the_sign_flip_test_is_the_enumeration_it_claims_to_be() -> None:
    d = np.array([0.3, -0.1, 0.2, 0.05])
    brute = np.mean([np.dot(signs, d) >= d.sum() - 1e-12 for signs in product([-1, 1], repeat=4)])
    assert sign_flip_p_value(d) == pytest.approx(brute)


@pytest.mark.parametrize("prompts", [8, 30])
def test_the_sign_flip_test_holds_its_level(prompts: int) -> None:
    random = np.random.default_rng(1)
    runs = 150
    rejected = sum(sign_flip_p_value(random.standard_t(3, prompts)) <= 0.05 for _ in range(runs))
    assert rejected <= most_rejections(runs, 0.05)


def test_identical_replays_are_steady_and_too_few_prompts_say_nothing() -> None:
    change = probes.compare(replay() + replay(), replay(), downward=True)
    assert change is not None
    assert (change.difference.low, change.difference.high, change.p_value) == (0.0, 0.0, 1.0)
    assert probes.behaviour(change, -0.1) == "steady"
    few = probes.compare(replay(prompts=7), replay(-0.2, prompts=7), downward=True)
    assert few is not None
    assert probes.behaviour(few, -0.2) == "too_few"


def test_noisy_probes_are_called_unclear_not_steady() -> None:
    random = np.random.default_rng(2)
    levels = random.uniform(0.2, 0.9, (2, 10))
    before, after = (
        [ProbeResult(f"p{i}", "a", 100, int(100 * x)) for i, x in enumerate(side)] for side in levels
    )
    change = probes.compare(before, after, downward=True)
    assert change is not None
    assert probes.behaviour(change, -0.1) == "unclear"


def test_answers_that_never_repeated_prove_nothing_about_the_target() -> None:
    restless = replay(answers="one") + replay(answers="two")
    change = probes.compare(restless, replay(answers="three"), downward=True)
    assert change is not None
    assert not change.is_answered_differently


def test_a_category_test_holds_its_level_and_sees_a_change() -> None:
    random = np.random.default_rng(3)
    runs = 150
    drawn = [(random.choice(list("abc"), 60), random.choice(list("abc"), 25)) for _ in range(runs)]
    p_values = [configuration.total_variation(Counter(one), Counter(two))[0] for one, two in drawn]
    assert sum(p <= 0.05 for p in p_values) <= most_rejections(runs, 0.05)
    p_value, distance = configuration.total_variation(Counter("a" * 40), Counter("a" * 10 + "b" * 20))
    assert p_value == pytest.approx(0.0002)
    assert distance == pytest.approx(2 / 3)


@settings(max_examples=60, deadline=None)
@given(*[st.lists(st.integers(0, 4).map(float), min_size=2, max_size=30)] * 2)
def test_ranks_are_compared_in_the_direction_that_is_said(before: list[float], after: list[float]) -> None:
    found, back = comparisons.compare_ranks(before, after), comparisons.compare_ranks(after, before)
    wins = sum((y > x) + (y == x) / 2 for x in before for y in after)
    assert found.superiority == pytest.approx(wins / (len(before) * len(after)))
    assert found.p_value == pytest.approx(back.p_value)
    assert (found.superiority > 0.5) <= (found.p_rose <= back.p_rose)
    if len({*before, *after}) == 1:
        assert (found.superiority, found.p_rose, found.p_value) == (0.5, 1.0, 1.0)
        return
    both = mannwhitneyu(after, before, alternative="two-sided", method="asymptotic")
    rose = mannwhitneyu(after, before, alternative="greater", method="asymptotic")
    assert found.superiority == pytest.approx(both.statistic / (len(before) * len(after)))
    assert (found.p_value, found.p_rose) == pytest.approx((both.pvalue, rose.pvalue))


def test_ranks_that_rose_are_told() -> None:
    found = comparisons.compare_ranks([1.0, 2.0, 2.0, 3.0, 4.0] * 3, [3.0, 4.0, 5.0, 5.0, 6.0] * 3)
    assert found.p_rose < 0.001 < 0.999 < comparisons.compare_ranks([9.0] * 15, [1.0, 2.0] * 8).p_rose


def test_no_setting_is_named_where_none_changed() -> None:
    named = 0
    for seed in range(40):
        before = requests(seed, {"german": 60}, {"german": 0.7})
        after = requests(1_000 + seed, {"german": 25}, {"german": 0.5})
        named += bool(configuration.compare(before, after).changes)
    assert named <= most_rejections(40, 0.01)


def test_the_query_test_holds_its_level() -> None:
    runs = 60
    p_values = []
    for seed in range(runs):
        drawn = captures(seed, "german", 30, CODE)
        found = captured_requests.compare_prompts(drawn[:18], drawn[18:], ("german",), 0.01)
        assert found is not None
        p_values.append(found.p_value)
    assert sum(p <= 0.05 for p in p_values) <= most_rejections(runs, 0.05)
    assert sum(p <= 0.5 for p in p_values) >= runs - most_rejections(runs, 0.5)  # and is not stuck at 1


def test_another_mix_of_the_changed_segments_is_no_query_drift() -> None:
    a, b = (0, 300), (600, 900)
    before = captures(1, "a", 60, a) + captures(2, "b", 15, b)
    after = captures(3, "a", 15, a) + captures(4, "b", 60, b)
    found = captured_requests.compare_prompts(before, after, ("a", "b"), 0.01)
    assert found is not None
    assert found.p_value > 0.05


def test_too_few_captures_are_not_compared() -> None:
    assert (
        captured_requests.compare_prompts(captures(1, "a", 9, CODE), captures(2, "a", 60, CODE), ("a",), 0.01)
        is None
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=40), min_size=1, max_size=6))
def test_any_token_ids_have_features_of_length_one_or_zero(prompts: list[list[int]]) -> None:
    rows = features_of(prompts)
    squares = (rows * rows).sum(axis=1)
    lengths = [(len(prompt) >= 1) + (len(prompt) >= 2) for prompt in prompts]
    assert squares == pytest.approx(lengths)


@pytest.mark.parametrize(
    ("tokens", "rate"),
    [([1, 2, 3], 0.0), (list(range(50)), 0.0), ([5] * 23, 19 / 20), ([1, 2] * 12, 19 / 21)],
)
def test_repetition(tokens: list[int], rate: float) -> None:
    assert repetition_rate(tokens) == pytest.approx(rate)


def test_a_rate_and_its_error_are_of_requests_not_of_tokens() -> None:
    assert rate_of([]) is None
    assert rate_of([(0, 0)]) is None
    one = rate_of([(10, 5)])
    assert one is not None
    assert one.error == LARGEST_ERROR
    many = rate_of([(1_000, 900), (1_000, 100)] * 50)
    assert many is not None
    assert many.error == pytest.approx(0.4 / math.sqrt(99))  # a binomial error would be .0016
    assert difference(many, one).p_value == 1.0
