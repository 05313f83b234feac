"""Configuration: which settings changed at the change point, and whether that explains the move.

Like is compared with like: acceptance within one value of a setting, before and after. What is left of the
move there is not the setting's doing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from driftguard.diagnosis.comparisons import (
    LEVEL,
    Difference,
    compare_ranks,
    decompose,
    difference,
    first_rate_by_session,
    rates_by,
)
from driftguard.diagnosis.evidence import Observed
from driftguard.records import verified_at_once

Field = Literal[
    "num_speculative_tokens",
    "drafted_per_step",
    "acceptance_rule",
    "verification",
    "temperature",
    "concurrency",
]
NAMES: Final[dict[Field, str]] = {
    "num_speculative_tokens": "K (num_speculative_tokens)",
    "drafted_per_step": "drafted tokens per step",
    "acceptance_rule": "the acceptance rule",
    "verification": "the verification rule",
    "temperature": "the sampling temperature",
    "concurrency": "the concurrency",
}
# Verification by blocks accepts the first token exactly as often as token by token (Sun et al. 2025: a run is
# kept with the probability min(.., p / q, 1) of its last token, whatever follows).
KEEPS_FIRST: Final[tuple[Field, ...]] = ("num_speculative_tokens", "verification")
NOT_TOLD: Final = "not told"  # K, of requests that are judged by position 1: it may vary
UNSAMPLED: Final = ("greedy", "typical")  # acceptance rules that are verified in ways of their own
PERMUTATIONS: Final = 4_999
RELEVANT_DISTANCE: Final = 0.2  # total variation; P(after > before) off one half by 0.3
RELEVANT_SUPERIORITY: Final = 0.3
EXPLAINED_SHARE: Final = 0.5
LEAST_KNOWN: Final = 0.9  # of the records must tell the field
LEAST_REQUESTS: Final = 10  # on each side


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One field whose distribution changed. `explained`: part of the move that lies between its values.

    `overlap`: part of the traffic in values seen on both sides; below .2 nothing like can be compared.
    `first_position`: change of acceptance at position 1, which a change of KEEPS_FIRST alone leaves as it is.
    """

    field: Field
    before: str  # the value whose share fell most
    after: str  # the value whose share rose most
    p_value: float
    distance: float
    explained: float
    overlap: float
    first_position: Difference | None

    @property
    def keeps_first(self) -> bool:
        """Whether it leaves acceptance at position 1 as it is. A tree has several tokens there; greedy and
        typical acceptance keep others."""
        return self.field in KEEPS_FIRST and not {self.before, self.after} & {"tree", *UNSAMPLED}

    @property
    def explains(self) -> bool:
        return self.explained >= EXPLAINED_SHARE


@dataclass(frozen=True, slots=True)
class Configuration:
    """What changed among the fields that the records tell."""

    changes: tuple[FieldChange, ...]  # best explanation first
    compared: tuple[Field, ...]
    untold: tuple[Field, ...]


def compare(before: Sequence[Observed], after: Sequence[Observed]) -> Configuration:
    """Of the changed segments, record by record.

    Categories (K, rule, temperature class): total variation distance of the two samples, p-value by
    relabelling records: their counts are multivariate hypergeometric, 4,999 seeded draws.
    Numbers (drafted per step, concurrency): Mann-Whitney, normal approximation with ties.
    A field has changed if p <= 1% / fields compared and the distance is relevant (.2; for numbers .3 off an
    even P(after > before)).
    Guarantee: at most 1% false "something changed" for exchangeable records. It does not hold under
    dependence: concurrency wanders with the hours, which is why a relevant distance is asked for as well.
    """
    if min(len(before), len(after)) < LEAST_REQUESTS:
        return Configuration((), (), tuple(_CLASS_OF))
    compared = [name for name in _CLASS_OF if _is_known(name, before) and _is_known(name, after)]
    found = {
        name: change
        for name in compared
        if (change := _change(name, before, after, LEVEL / len(compared))) is not None
    }
    if (k := found.get("num_speculative_tokens")) is not None:
        if NOT_TOLD in (k.before, k.after) and "drafted_per_step" not in found:  # only told now, or no more
            del found["num_speculative_tokens"]
            compared.remove("num_speculative_tokens")
        found.pop("drafted_per_step", None)  # it follows K
    if "acceptance_rule" in found and _is_of_rule(found.get("verification")):
        del found["verification"]
    changes = sorted(
        found.values(), key=lambda change: (-change.explained, list(_CLASS_OF).index(change.field))
    )
    untold = tuple(name for name in _CLASS_OF if name not in compared)
    return Configuration(tuple(changes), tuple(compared), untold)


def _change(
    name: Field, before: Sequence[Observed], after: Sequence[Observed], level: float
) -> FieldChange | None:
    class_of = _CLASS_OF[name]
    classes0, classes1 = Counter(map(class_of, before)), Counter(map(class_of, after))
    if name in _VALUE_OF:
        p_value, distance, relevant = _rank_test(name, before, after)
    else:
        p_value, distance = total_variation(classes0, classes1)
        relevant = distance >= RELEVANT_DISTANCE
    if p_value > level or not relevant:
        return None

    def cell(one: Observed) -> tuple[str, str | None]:
        return one.segment, class_of(one)

    def risen(value: str) -> float:
        return classes1[value] / len(after) - classes0[value] / len(before)

    told = [value for value in {**classes0, **classes1} if value is not None]
    parts = decompose(rates_by(before, cell), rates_by(after, cell))
    return FieldChange(
        field=name,
        before=min(told, key=risen),
        after=max(told, key=risen),
        p_value=p_value,
        distance=distance,
        explained=parts.mix_share if parts else 0.0,
        overlap=parts.overlap if parts else 0.0,
        first_position=_first_position(before, after),
    )


def total_variation(before: Counter[str | None], after: Counter[str | None]) -> tuple[float, float]:
    """(p-value, distance): half the sum of absolute differences of the two samples' shares."""
    values = sorted({*before, *after}, key=str)
    counts0 = np.array([before[value] for value in values])
    both = counts0 + np.array([after[value] for value in values])
    n0, n = int(counts0.sum()), int(both.sum())

    def distance(first: NDArray[np.int64]) -> NDArray[np.float64]:
        shares: NDArray[np.float64] = np.abs(first / n0 - (both - first) / (n - n0))
        return np.asarray(shares.sum(axis=-1) / 2)

    observed = float(distance(counts0))
    relabelled = np.random.default_rng(0).multivariate_hypergeometric(both, n0, size=PERMUTATIONS)
    as_far = int(np.sum(distance(relabelled) >= observed - 1e-12))
    return (1 + as_far) / (PERMUTATIONS + 1), observed


def _rank_test(
    name: Field, before: Sequence[Observed], after: Sequence[Observed]
) -> tuple[float, float, bool]:
    value_of = _VALUE_OF[name]
    test = compare_ranks([value_of(one) for one in before], [value_of(one) for one in after])
    distance = abs(test.superiority - 0.5)
    return test.p_value, distance, distance >= RELEVANT_SUPERIORITY


def _first_position(before: Sequence[Observed], after: Sequence[Observed]) -> Difference | None:
    first = [first_rate_by_session(side) for side in (before, after)]
    return difference(first[0], first[1]) if first[0] and first[1] else None


def _is_known(name: Field, requests: Sequence[Observed]) -> bool:
    told = sum(_CLASS_OF[name](one) is not None for one in requests)
    return told >= LEAST_KNOWN * len(requests)


def _temperature_class(one: Observed) -> str | None:
    """greedy, then steps in which vLLM's and others' users think: up to .5, up to 1, above."""
    if one.temperature is None:
        return None
    if one.temperature == 0.0:
        return "greedy"
    return "up to 0.5" if one.temperature <= 0.5 else "up to 1" if one.temperature <= 1.0 else "above 1"


def _concurrency_class(one: Observed) -> str | None:
    """Powers of two: 1, 2-3, 4-7, ..."""
    if one.concurrency is None:
        return None
    lowest = 2 ** max(one.concurrency.bit_length() - 1, 0)
    return str(one.concurrency) if one.concurrency < 2 else f"{lowest} to {2 * lowest - 1}"


def _drafted_per_step(one: Observed) -> float:
    return one.drafted / one.steps if one.steps else 0.0


def _k(one: Observed) -> str | None:
    if one.by_first:
        return NOT_TOLD
    return None if one.num_speculative_tokens is None else str(one.num_speculative_tokens)


def _verification(one: Observed) -> str | None:
    """Not told where the acceptance rule is not either: older records are of the token rule. Greedy requests
    are verified alike beside block and token, so they are never counted as either."""
    if one.verification == one.acceptance_rule == "unknown":
        return None
    if one.verification != "tree":
        for rule in (one.acceptance_rule, one.verification):
            if rule in UNSAMPLED:
                return rule
    return verified_at_once(one.verification)


def _is_of_rule(verification: FieldChange | None) -> bool:
    """Whether only the share of greedy or typical acceptance moved, which the acceptance rule tells."""
    return verification is not None and bool({verification.before, verification.after} & {*UNSAMPLED})


_CLASS_OF: Final[dict[Field, Callable[[Observed], str | None]]] = {
    "num_speculative_tokens": _k,
    "drafted_per_step": lambda one: f"{_drafted_per_step(one):.0f}" if one.steps else None,
    "acceptance_rule": lambda one: None if one.acceptance_rule == "unknown" else one.acceptance_rule,
    "verification": _verification,
    "temperature": _temperature_class,
    "concurrency": _concurrency_class,
}
_VALUE_OF: Final[dict[Field, Callable[[Observed], float]]] = {
    "drafted_per_step": _drafted_per_step,
    "concurrency": lambda one: float(one.concurrency or 0),
}
