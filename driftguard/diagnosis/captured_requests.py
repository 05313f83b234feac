"""Captured requests before and after, without labels: did the prompts change (query drift), what are they
like now, and do the answers repeat themselves?

Prompts become vectors of hashed n-grams: no tokenizer and no model is needed. They are compared by a
two-sample energy statistic with a permutation p-value. Looping or garbled output is easy to guess, so where
answers repeat themselves acceptance rises far too high.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from driftguard.diagnosis.comparisons import compare_ranks
from driftguard.diagnosis.evidence import Captured

DIMENSIONS: Final = 256  # per length of n-gram
LENGTHS: Final = (1, 2)
NEWEST_TOKENS: Final = 2_048  # of a prompt: its end says most, and long contexts must not cost more

Floats = NDArray[np.float64]
_MULTIPLIERS: Final = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], dtype=np.uint64)
_BITS: Final = np.uint64(64 - (DIMENSIONS - 1).bit_length())


def features_of(prompts: Sequence[Sequence[int]]) -> Floats:
    """One row per prompt: [prompts, len(LENGTHS) * DIMENSIONS].

    Per length of n-gram: counts c in 256 hashed bins, then sqrt(c / sum c), so that the inner product of two
    rows is the Bhattacharyya coefficient of their n-gram frequencies. Different n-grams may share a bin: that
    hides a difference at worst, and never makes one.
    Paper: Weinberger et al., Feature hashing for large scale multitask learning (ICML 2009).
    """
    rows = np.zeros((len(prompts), len(LENGTHS) * DIMENSIONS))
    for row, prompt in zip(rows, prompts, strict=True):
        tokens = np.asarray(prompt[-NEWEST_TOKENS:], dtype=np.uint64)
        for place, length in enumerate(LENGTHS):
            counts = np.bincount(_bins(tokens, length), minlength=DIMENSIONS)
            total = max(int(counts.sum()), 1)
            row[place * DIMENSIONS : (place + 1) * DIMENSIONS] = np.sqrt(counts / total)
    return rows


def _bins(tokens: NDArray[np.uint64], length: int) -> NDArray[np.int64]:
    """Multiplicative hashing: the top bits of sum_i m_i (token_i + 1), modulo 2^64."""
    count = max(len(tokens) - length + 1, 0)
    mixed = np.zeros(count, dtype=np.uint64)
    for offset in range(length):
        mixed += (tokens[offset : offset + count] + np.uint64(1)) * _MULTIPLIERS[offset]
    mixed ^= mixed >> np.uint64(29)
    bins: NDArray[np.int64] = ((mixed * _MULTIPLIERS[0]) >> _BITS).astype(np.int64)
    return bins


SAMPLE: Final = 150  # requests per segment and side; a matrix of 300 x 300 distances
MINIMUM_SAMPLE: Final = 10
MINIMUM_CONVERSATIONS: Final = 6  # on each side: 924 ways to relabel them
PERMUTATIONS: Final = 999
PLANTS: Final = 5  # tries with a planted move
MOST_EXAMPLES: Final = 3
NEAR: Final = 0.5  # of the distance to its own past: nearer than that looks like another segment
NEW_TOPIC: Final = "new topic"


@dataclass(frozen=True, slots=True)
class QueryChange:
    """Prompts of the changed segments before and after. `distance`: squared energy distance, unbiased,
    so about 0 if nothing moved.

    `nearest`: the known segment that the prompts look like now, or "new topic"; None while they have not
    moved. `examples`: record ids of captured requests that are least like the segment's own past.
    """

    requests_before: int
    requests_after: int
    conversations: int  # on the side that has fewer
    distance: float
    p_value: float
    nearest: str | None
    examples: tuple[str, ...]
    would_be_seen: bool  # a move of half of the conversations to other segments: else "no move" says nothing


def compare_prompts(
    before: Sequence[Captured], after: Sequence[Captured], changed: Sequence[str], level: float
) -> QueryChange | None:
    """None where no changed segment has MINIMUM_SAMPLE captured requests on both sides.

    Statistic: sum over the changed segments c of n m / (n + m) E_c, where
    E = 2 mean |X - Y| - mean |X - X'| - mean |Y - Y'| over conversations, each the mean of its prompts'
    features, X before, Y after; n and m conversations.
    p-value: conversations are relabelled within their segment, 999 seeded times, so that another mix of the
    changed segments is no query drift; (1 + as large) / 1000.
    Guarantee: P(p <= level) <= level, exactly, if the conversations of each segment are exchangeable. A
    conversation is a named session, else prompts that begin with the whole of another (`conversations_of`):
    those of one user that begin anew each time still count as several.
    Paper: Szekely, Rizzo, Energy statistics (J. Stat. Planning and Inference 143, 2013).
    """
    past, now = _by_segment(before), _by_segment(after)
    usable = [
        name for name in changed if min(len(past.get(name, ())), len(now.get(name, ()))) >= MINIMUM_SAMPLE
    ]
    belongs = {name: [conversations_of(side[name]) for side in (past, now)] for name in usable}
    usable = [name for name in usable if min(len(set(of)) for of in belongs[name]) >= MINIMUM_CONVERSATIONS]
    if not usable:
        return None
    rows = {name: features_of([one.prompt for one in requests]) for name, requests in past.items()}
    new_rows = {name: features_of([one.prompt for one in now[name]]) for name in usable}
    random = np.random.default_rng(0)
    observed, relabelled = 0.0, np.zeros(PERMUTATIONS)
    weight, distance = 0.0, 0.0
    for name in usable:
        x, y = rows[name], new_rows[name]
        ours, theirs = (_means(side, of) for side, of in zip((x, y), belongs[name], strict=True))
        scale = len(ours) * len(theirs) / (len(ours) + len(theirs))
        real, null = _energy(ours, theirs, random)
        observed, relabelled = observed + scale * real, relabelled + scale * null
        weight, distance = weight + len(y), distance + len(y) * energy_distance(x, y)
    p_value = float((1 + np.sum(relabelled >= observed - 1e-12)) / (PERMUTATIONS + 1))
    moved = p_value <= level
    means = {name: _means(side, conversations_of(past[name])) for name, side in rows.items()}
    new_means = {name: _means(new_rows[name], belongs[name][1]) for name in usable}
    return QueryChange(
        requests_before=sum(len(past[name]) for name in usable),
        requests_after=sum(len(now[name]) for name in usable),
        conversations=min(sum(len(set(belongs[name][side])) for name in usable) for side in (0, 1)),
        distance=distance / weight,
        p_value=p_value,
        nearest=_nearest(usable, rows, new_rows) if moved else None,
        examples=_examples(now[usable[0]], rows[usable[0]], new_rows[usable[0]]) if moved else (),
        would_be_seen=moved or _would_be_seen(means, new_means, level),
    )


def _would_be_seen(means: Mapping[str, Floats], new_means: Mapping[str, Floats], level: float) -> bool:
    """Whether the test rejects each time that half of the conversations since, drawn at random, are replaced
    by earlier ones of other segments. False where no other segment was captured."""
    random = np.random.default_rng(1)
    for _ in range(PLANTS):
        observed, relabelled = 0.0, np.zeros(PERMUTATIONS)
        for name, new in new_means.items():
            others = [rows for other, rows in means.items() if other != name]
            if not others:
                return False
            pool, planted = np.concatenate(others), new.copy()
            places = random.permutation(len(new))[: (len(new) + 1) // 2]
            planted[places] = pool[random.integers(len(pool), size=len(places))]
            scale = len(means[name]) * len(planted) / (len(means[name]) + len(planted))
            real, null = _energy(means[name], planted, random)
            observed, relabelled = observed + scale * real, relabelled + scale * null
        if 1 + np.sum(relabelled >= observed - 1e-12) > level * (PERMUTATIONS + 1):
            return False
    return True


def energy_distance(x: Floats, y: Floats) -> float:
    """Squared energy distance of two samples of rows, unbiased: a row is not compared with itself."""
    inside = (float(distances_of(one, one).sum()) / (len(one) * (len(one) - 1)) for one in (x, y))
    return 2.0 * float(distances_of(x, y).mean()) - sum(inside)


def _energy(x: Floats, y: Floats, random: np.random.Generator) -> tuple[float, Floats]:
    """The statistic, and its values under PERMUTATIONS relabellings: -s' D s, s = (1/n, ..., -1/m, ...)."""
    both = np.concatenate([x, y])
    distances = distances_of(both, both)
    labels = np.concatenate([np.full(len(x), 1.0 / len(x)), np.full(len(y), -1.0 / len(y))])
    signs = random.permuted(np.tile(labels, (PERMUTATIONS, 1)), axis=1)  # [PERMUTATIONS, n + m]
    null = -np.sum((signs @ distances) * signs, axis=1)
    return float(-labels @ distances @ labels), null


def _means(rows: Floats, belongs: Sequence[int]) -> Floats:
    """One row per conversation: the mean of its rows."""
    numbers = np.array(belongs)
    return np.array([rows[numbers == number].mean(axis=0) for number in np.unique(numbers)])


def conversations_of(requests: Sequence[Captured]) -> list[int]:
    """A number for each request: the same for those of one named session, and of the unnamed for those whose
    prompt begins with the whole prompt of another. Prompts longer than NEWEST_TOKENS have lost their
    beginning, so their turns count as conversations of their own."""
    numbers: list[int] = [-1] * len(requests)
    by_session: dict[str, int] = {}
    open_: list[tuple[tuple[int, ...], int]] = []  # prompts that the next may begin with, the shortest first
    found = 0
    for place in sorted(range(len(requests)), key=lambda place: requests[place].prompt):
        one = requests[place]
        while open_ and one.prompt[: len(open_[-1][0])] != open_[-1][0]:
            open_.pop()
        if one.session is not None:
            number = by_session.setdefault(one.session, found)
        else:
            number = open_[-1][1] if open_ else found
            if one.prompt:
                open_.append((one.prompt, number))
        found += number == found
        numbers[place] = number
    return numbers


def distances_of(x: Floats, y: Floats) -> Floats:
    squares = (x * x).sum(axis=1)[:, None] + (y * y).sum(axis=1)[None, :] - 2.0 * x @ y.T
    distances: Floats = np.sqrt(np.maximum(squares, 0.0))
    return distances


def _nearest(changed: Sequence[str], rows: Mapping[str, Floats], new_rows: Mapping[str, Floats]) -> str:
    """The segment whose past is nearest to what the first changed segment asks now. Described, not tested."""
    name = changed[0]
    own = energy_distance(rows[name], new_rows[name])
    others = {
        other: energy_distance(past, new_rows[name])
        for other, past in sorted(rows.items())
        if other not in changed and len(past) >= MINIMUM_SAMPLE
    }
    best = min(others, key=others.__getitem__, default=None)
    return best if best is not None and others[best] < NEAR * own else NEW_TOPIC


def _examples(requests: Sequence[Captured], past: Floats, now: Floats) -> tuple[str, ...]:
    """Those that are far from the past and near to the rest of the present: typical of what is new."""
    novelty = distances_of(now, past).mean(axis=1) - distances_of(now, now).mean(axis=1)
    return tuple(requests[place].record_id for place in np.argsort(-novelty)[:MOST_EXAMPLES])


def _by_segment(captured: Sequence[Captured]) -> dict[str, list[Captured]]:
    """At most SAMPLE of each segment: the newest, which stand last."""
    found: dict[str, list[Captured]] = {}
    for one in captured:
        found.setdefault(one.segment, []).append(one)
    return {name: requests[-SAMPLE:] for name, requests in found.items()}


NGRAM: Final = 4  # tokens of an n-gram
MINIMUM_OUTPUT: Final = 16  # tokens; shorter answers have hardly any n-gram to repeat
RELEVANT_RISE: Final = 0.1  # of the mean repetition rate


@dataclass(frozen=True, slots=True)
class Repetition:
    """Mean repetition rate of captured answers before and after, and the p-value of "it has not risen"."""

    requests_before: int
    requests_after: int
    before: float
    after: float
    p_value: float

    def rose(self, level: float) -> bool:
        return self.p_value <= level and self.after - self.before >= RELEVANT_RISE


def repetition_rate(tokens: Sequence[int]) -> float:
    """Part of the 4-grams of a text that occurred in it before: 1 - distinct / all; 0 for short texts.

    Paper: Welleck et al., Neural text generation with unlikelihood training (2020), seq-rep-4.
    """
    grams = [tuple(tokens[place : place + NGRAM]) for place in range(len(tokens) - NGRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def compare_answers(
    before: Sequence[Captured], after: Sequence[Captured], changed: Sequence[str]
) -> Repetition | None:
    """None where there are too few captured answers of the changed segments on either side.

    Test: Mann-Whitney on the answers' rates, one-sided. Assumption: independent requests; the level is
    approximate below some 20 requests a side.
    """
    rates0, rates1 = (
        [repetition_rate(one.output) for one in side if _counts(one, changed)] for side in (before, after)
    )
    if min(len(rates0), len(rates1)) < MINIMUM_SAMPLE:
        return None
    p_value = compare_ranks(rates0, rates1).p_rose
    return Repetition(len(rates0), len(rates1), float(np.mean(rates0)), float(np.mean(rates1)), p_value)


def _counts(one: Captured, changed: Sequence[str]) -> bool:
    return one.segment in changed and len(one.output) >= MINIMUM_OUTPUT
