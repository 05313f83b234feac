"""Strata: the requests of a segment that may be compared with each other.

Acceptance changes with the configuration without any drift, so every combination of (segment, kind,
num_speculative_tokens, acceptance_rule, verification, class of temperature, length known or not, positions
judged) has a baseline of its own. Of verification only what acceptance_rule does not say yet: by blocks or
trees, or else token by token, which also counts where it is not told. A new combination therefore begins a
new baseline, and says so; a shift of the mix of strata is no drift by construction. Answer length itself is
regressed out (`baseline.py`).

K that is chosen by the load and by what is accepted selects: at a high load only the requests that accept
best keep a large K, so that the mean at one K moves although no request accepts less. So in a stream whose K
has changed VARIES times from one request to the next, a request that gives counts of its first position is
judged by that, whatever its K (as where K is not told: `driftguard.records.positions`). Any other is compared
with those of the same K, and SELECTION standard deviations between requests are no change: the mean of a
stratum that keeps the better half of requests moves by .8 of them, of one that keeps the better two thirds by
.55.

A stratum is kept as (index of its segment, setting), the setting packed into one whole number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.findings import BaselineReason, ChangedSetting, WhyBegun
from driftguard.detection.observations import ObservationBatch
from driftguard.records import MAX_SEGMENTS_PER_STREAM, OTHER_SEGMENT, AcceptanceRule
from driftguard.records.positions import Positions

Ints = NDArray[np.int64]

MAX_STRATA = 512  # per stream; what comes later shares a few strata of the segment 'other'
MAX_SHARED = 6  # kind, length known and positions judged are never given up
NO_SETTING = -1
KINDS = ("request", "window")
RULES = get_args(AcceptanceRule)
# Each of the usual settings (.2, .6, .7, .8, 1) is in a class of its own, and every class within one of those
# that a diagnosis compares.
TEMPERATURE_CLASSES = (0.25, 0.5, 0.65, 0.75, 0.9, 1.0, 1.5)  # largest temperature of each but the last
_SAMPLED = tuple(f"({low:g}, {high:g}]" for low, high in pairwise((0.0, *TEMPERATURE_CLASSES)))
# 'sampled' is of settings that were packed before there were classes
TEMPERATURES = ("unknown", "greedy", "sampled", *_SAMPLED, f"above {TEMPERATURE_CLASSES[-1]:g}")
_K_BITS, _RULE_BITS, _TEMPERATURE_BITS = 11, 2, 2
_KIND_AT = 1 + _TEMPERATURE_BITS + _RULE_BITS + _K_BITS
_FIRST_AT = _KIND_AT + 1  # above all others: what was packed before there was this bit keeps its meaning
_CLASS_AT = _FIRST_AT + 1  # so are these: of sampled requests, the place of their class after 'sampled'
_CLASS_BITS = 4
_SELECTED_AT = _CLASS_AT + _CLASS_BITS
_AT_ONCE_AT = _SELECTED_AT + 1  # 0, so token, in what was packed before there was this
_AT_ONCE = ("token", "block", "tree")

VARIES = 8  # changes of K over the life of a stream: more than it is set anew
SELECTION = 0.55


@dataclass(frozen=True, slots=True)
class Setting:
    """What a stratum's requests have in common besides their segment."""

    kind: str
    num_speculative_tokens: int | None
    acceptance_rule: str
    temperature: str  # unknown, greedy (0), or the class in which it lies
    length_known: bool
    positions: Positions = "all"  # judged, all or first: see driftguard.records.positions
    k_varies: bool = False  # and may select the requests: as said above
    verification: str = "token"  # or block, tree

    def __str__(self) -> str:
        k = self.num_speculative_tokens
        return ", ".join(
            [
                self.kind,
                f"num_speculative_tokens {'unknown' if k is None else k}",
                f"acceptance_rule {self.acceptance_rule}",
                f"temperature {self.temperature}",
                f"output_tokens {'known' if self.length_known else 'unknown'}",
                *(["judged by the first draft token"] if self.positions == "first" else []),
                *(["K varies"] if self.k_varies else []),
                *([f"verification {self.verification}"] if self.verification != "token" else []),
            ]
        )


def settings_of(batch: ObservationBatch, k_varies: NDArray[np.bool_]) -> Ints:
    """Each observation's setting, packed: [N]. `k_varies` [N]: told, and may select."""
    kind, rule = _places(batch.kind, KINDS), _places(batch.acceptance_rule, RULES)
    sampled = batch.temperature > 0.0
    temperature = np.where(np.isnan(batch.temperature), 0, np.where(sampled, 2, 1))
    of_class = np.where(sampled, np.searchsorted(TEMPERATURE_CLASSES, batch.temperature) + 1, 0)
    packed = kind << _K_BITS | (batch.num_speculative_tokens + 1)
    packed = (packed << _RULE_BITS | rule) << _TEMPERATURE_BITS | temperature
    packed = packed << 1 | ((batch.output_tokens >= 0) & (kind == 0))
    by_first = (batch.first_drafted >= 0) & (batch.num_speculative_tokens < 0)
    packed |= by_first.astype(np.int64) << _FIRST_AT | of_class << _CLASS_AT
    if not {*batch.verification}.isdisjoint(_AT_ONCE[1:]):
        at_once = [one if one in _AT_ONCE else _AT_ONCE[0] for one in batch.verification]
        packed |= _places(at_once, _AT_ONCE) << _AT_ONCE_AT
    settings: Ints = packed | k_varies.astype(np.int64) << _SELECTED_AT
    return settings


def _places(names: Sequence[str], known: Sequence[str]) -> Ints:
    present = set(names)
    if len(present) == 1:  # as in nearly every batch
        return np.full(len(names), known.index(present.pop()), dtype=np.int64)
    return np.array([known.index(name) for name in names], dtype=np.int64)


def is_window(settings: Ints) -> NDArray[np.bool_]:
    """Which packed settings are of windows."""
    kind: NDArray[np.bool_] = settings >> _KIND_AT & 1 == 1
    return kind


def is_by_first(settings: Ints) -> NDArray[np.bool_]:
    """Which packed settings are of requests judged by their first position."""
    by_first: NDArray[np.bool_] = settings >> _FIRST_AT & 1 == 1
    return by_first


def is_selected(settings: Ints) -> NDArray[np.bool_]:
    """Which packed settings are of requests that a varying K may select."""
    selected: NDArray[np.bool_] = settings >> _SELECTED_AT & 1 == 1
    return selected


def varying(newest: int, changes: int, k: NDArray[np.int64]) -> tuple[NDArray[np.bool_], int, int]:
    """Which of N drafted requests that told their `k` [N] have one that varies; the newest K told (-1: none)
    and how often it changed, VARIES at most. `newest` and `changes` are those before them.
    """
    if len(k) == 0:
        return np.zeros(0, dtype=np.bool_), newest, changes
    before = np.concatenate([[k[0] if newest < 0 else newest], k[:-1]])
    so_far = changes + np.cumsum(k != before)
    return so_far >= VARIES, int(k[-1]), min(int(so_far[-1]), VARIES)


def unpack(setting: int) -> Setting:
    rest, known = setting >> 1, bool(setting & 1)
    rest, temperature = rest >> _TEMPERATURE_BITS, rest & (2**_TEMPERATURE_BITS - 1)
    rest, rule = rest >> _RULE_BITS, rest & (2**_RULE_BITS - 1)
    rest, k = rest >> _K_BITS, rest & (2**_K_BITS - 1)
    positions: Positions = "first" if rest >> 1 & 1 else "all"
    temperature += setting >> _CLASS_AT & (2**_CLASS_BITS - 1)
    return Setting(
        kind=KINDS[rest & 1],
        num_speculative_tokens=k - 1 if k else None,
        acceptance_rule=RULES[rule],
        temperature=TEMPERATURES[temperature],
        length_known=known,
        positions=positions,
        k_varies=bool(setting >> _SELECTED_AT & 1),
        verification=_AT_ONCE[setting >> _AT_ONCE_AT],
    )


def without_configuration(setting: int) -> int:
    """The setting with everything unknown that can be; kind, length known and positions stay."""
    known = unpack(setting)
    packed = KINDS.index(known.kind) << (_K_BITS + _RULE_BITS + _TEMPERATURE_BITS)
    packed |= RULES.index("unknown") << _TEMPERATURE_BITS
    return (known.positions == "first") << _FIRST_AT | packed << 1 | known.length_known


def assign(names: list[str], strata: list[tuple[int, int]], observed: Iterable[tuple[str, int]]) -> list[int]:
    """The stratum of each (segment, setting); `names` and `strata` grow by those not seen before.

    A setting of NO_SETTING (nothing was drafted) makes the segment known and has no stratum: 0.
    At most MAX_SEGMENTS_PER_STREAM names beside 'other', as they are stored, and MAX_STRATA strata: later
    segments share 'other', and the requests of later strata go there without their configuration.
    """
    segment_of = {name: place for place, name in enumerate(names)}
    code_of = {stratum: place for place, stratum in enumerate(strata)}
    known: dict[tuple[str, int], int] = {}

    def segment(name: str) -> int:
        if name not in segment_of:
            if len(segment_of.keys() - {OTHER_SEGMENT}) >= MAX_SEGMENTS_PER_STREAM:
                name = OTHER_SEGMENT
            if name not in segment_of:
                segment_of[name] = len(names)
                names.append(name)
        return segment_of[name]

    def stratum(pair: tuple[str, int]) -> int:
        wanted = (segment(pair[0]), pair[1])
        if pair[1] == NO_SETTING:
            return 0
        if wanted not in code_of and len(strata) >= MAX_STRATA - MAX_SHARED:
            wanted = (segment(OTHER_SEGMENT), without_configuration(pair[1]))
        if wanted not in code_of:
            code_of[wanted] = len(strata)
            strata.append(wanted)
        return code_of[wanted]

    codes = []
    for pair in observed:
        code = known.get(pair)
        if code is None:
            code = known[pair] = stratum(pair)
        codes.append(code)
    return codes


def why_new(setting: int, earlier: int | None) -> WhyBegun:
    """Why a baseline begins: against the setting of the segment's newest earlier baseline."""
    if earlier is None:
        return WhyBegun(BaselineReason.FIRST)
    new, old = unpack(setting), unpack(earlier)
    both = ((field.name, getattr(old, field.name), getattr(new, field.name)) for field in fields(Setting))
    changed = tuple(
        ChangedSetting(name, _word(before), _word(after)) for name, before, after in both if before != after
    )
    return WhyBegun(BaselineReason.SETTINGS_CHANGED if changed else BaselineReason.RELEARNED, changed)


def _word(value: object) -> str:
    return "unknown" if value is None else {True: "yes", False: "no"}.get(value, str(value))  # type: ignore[call-overload]
