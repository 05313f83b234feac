"""Every test of a diagnosis, run once on the evidence. What they mean is decided in decision.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from driftguard.diagnosis import (
    captured_requests,
    configuration,
    like_with_like,
    pace,
    probes,
    server_age,
    serving_gap,
    slices,
    template,
)
from driftguard.diagnosis.captured_requests import QueryChange, Repetition
from driftguard.diagnosis.comparisons import (
    EXCLUDED_SHARE,
    LEVEL,
    Decomposition,
    Difference,
    of_segments,
)
from driftguard.diagnosis.configuration import Configuration, FieldChange
from driftguard.diagnosis.evidence import EngineChange, Evidence, Observed
from driftguard.diagnosis.like_with_like import LikeWithLike
from driftguard.diagnosis.pace import Load, Looping
from driftguard.diagnosis.probes import Behaviour, ProbeChange
from driftguard.diagnosis.server_age import ServerAge
from driftguard.diagnosis.serving_gap import ServingGap
from driftguard.diagnosis.slices import FirstPosition, Slices
from driftguard.diagnosis.template import Template
from driftguard.records.positions import Positions, combined

ENOUGH_QUERIES: Final = 50  # captured requests a side; fewer cannot show that prompts stayed as they were
LOOKS_AS_BEFORE: Final = 0.1  # p-value from which prompts did not move; between LEVEL and it neither is shown
OF_K: Final = ("num_speculative_tokens", "drafted_per_step")
EXCLUDING: Final = ("steady", "moved_less")  # probes that exclude half of the traffic's move
PROBED_CACHE: Final = 0.1  # of a prompt: how much more from the cache than any probe still counts as probed
PROBED_PART: Final = 0.9  # of the requests: then the probes ask what the traffic asks


@dataclass(frozen=True, slots=True)
class Examination:
    """`move`: signed change of acceptance inside the changed segments, at the `positions` by which their
    requests are judged; `change`: the same with its interval; `towards`: its size in the direction of the
    incident. `queries_moved` None: cannot tell.

    `probed`: the change among requests no longer and no more cached than the canary prompts; None where these
    are nearly all, where nothing tells, or where they are too few.
    """

    move: float
    towards: float
    change: Difference | None
    positions: Positions
    segments: Decomposition | None
    settings: Configuration
    probes: ProbeChange | None
    probes_behaviour: Behaviour | Literal["none"]
    warm_probes: ProbeChange | None
    warm_behaviour: Behaviour | Literal["none"]
    probed_part: float
    probed: Difference | None
    queries: QueryChange | None
    queries_moved: bool | None
    alike: LikeWithLike | None
    repetition: Repetition | None
    looping: Looping | None
    template: Template | None
    age: ServerAge | None
    slices: tuple[Slices, ...]
    first: FirstPosition | None
    load: Load | None
    gap: ServingGap | None
    engine_change: EngineChange | None

    @property
    def is_rise(self) -> bool:
        return self.towards > 0.0

    def explaining(self) -> FieldChange | None:
        """The changed setting that explains the move best, if one does; K and the verification rule only if
        position 1 kept still."""
        return next((change for change in self.settings.changes if self._explains(change)), None)

    def moved_k(self) -> bool:
        """K follows acceptance where it varies: what was drafted then moves as well, and explains nothing."""
        return self.positions != "all" and any(change.field in OF_K for change in self.settings.changes)

    @property
    def alike_outcome(self) -> like_with_like.Outcome | Literal["none"]:
        return self.alike.outcome(self.towards) if self.alike else "none"

    @property
    def traffic_moved(self) -> bool:
        """The queries moved, or those that look as before are accepted as before while all together are not;
        and not if those that look as before fell too."""
        if self.alike_outcome == "fell":
            return False
        return bool(self.queries_moved) or (self.alike_outcome == "kept" and not self.has_not_moved)

    @property
    def has_not_moved(self) -> bool:
        """Acceptance inside the changed segments: no move is shown."""
        return self.change is not None and self.change.p_value > LEVEL

    @property
    def gap_behaviour(self) -> serving_gap.Behaviour | Literal["none"]:
        if self.gap is None:
            return "none"
        return "unclear" if self.has_not_moved else self.gap.behaviour(self.towards)

    @property
    def fits_less(self) -> bool:
        """Target and draft account for the fall: the draft fits the requests since the change less."""
        return self.gap is not None and self.gap.offline_moved(self.towards, self.change)

    @property
    def serves_as_before(self) -> bool:
        """Captured requests are accepted as target and draft account for, which excludes the engine unless
        the canary probes contradict; and the answers are still this target's. Where they are too few to show
        that, it is enough that the models account for the fall and nothing shows another target: one that
        accepts otherwise opens the gap."""
        if self.gap is None or self.probes_behaviour == "moved" or self.gap_behaviour != "steady":
            return False
        return self.gap.answers_are_own or (self.fits_less and not self.gap.answers_are_others)

    @property
    def same_target(self) -> bool:
        """Another target is excluded."""
        by_probes = self.probes is not None and self.probes.is_answered_alike
        return by_probes or (self.gap is not None and self.gap.answers_are_own)

    @property
    def probes_cover(self) -> bool:
        """Whether steady probes exclude the engine: the traffic is like them, or fell where it is."""
        if self.probed_part >= PROBED_PART:
            return True
        if self.probed is None:
            return False
        along = self.probed.change * (1.0 if self.towards > 0 else -1.0)
        return self.probed.p_value <= LEVEL and along >= EXCLUDED_SHARE * abs(self.move)

    def _explains(self, change: FieldChange) -> bool:
        first = change.first_position
        if change.field in OF_K and self.positions != "all" and change.after != configuration.NOT_TOLD:
            return False
        if change.keeps_first and first is not None:
            fell_too = first.p_value <= LEVEL and abs(first.change) >= probes.RELEVANT_SHARE * abs(self.move)
            return change.explains and not fell_too
        return change.explains


def examine(evidence: Evidence) -> Examination:
    """Runs the tests. Pure: seeded where labels are drawn."""
    before = [one for one in evidence.before if one.segment in evidence.changed]
    after = [one for one in evidence.after if one.segment in evidence.changed]
    own = of_segments(before, after)
    move = own.within if own else 0.0
    probed, warm = (_compared(evidence, is_warm=is_warm) for is_warm in (False, True))
    towards = abs(move) if evidence.direction == "up" else -abs(move)
    captured = evidence.captures_before, evidence.captures_after
    queries = captured_requests.compare_prompts(*captured, evidence.changed, LEVEL)
    behaviour, warm_behaviour = (_behaviour(one, towards) for one in (probed, warm))
    asked = [probed, warm] if warm_behaviour in EXCLUDING else [probed]
    part, change_of_probed = _probed([one for one in asked if one is not None], before, after)
    sliced = (slices.compare("cached_share", before, after), slices.compare("prompt_tokens", before, after))
    return Examination(
        move=move,
        towards=towards,
        change=slices.change_among(before, after, lambda _: True),
        positions=positions_of(after),
        segments=of_segments(evidence.before, evidence.after),
        settings=configuration.compare(before, after),
        probes=probed,
        probes_behaviour=behaviour,
        warm_probes=warm,
        warm_behaviour=warm_behaviour,
        probed_part=part,
        probed=change_of_probed,
        queries=queries,
        queries_moved=_moved(queries),
        alike=like_with_like.compare(*captured, evidence.changed),
        repetition=captured_requests.compare_answers(*captured, evidence.changed),
        looping=pace.compare_looping(before, after),
        template=template.compare(*captured, evidence.changed),
        age=server_age.compare(before, after, evidence.probes_before),
        slices=tuple(one for one in sliced if one is not None),
        first=slices.compare_first(evidence.before, evidence.after),
        load=pace.compare_steps(before, after),
        gap=serving_gap.compare(evidence.scores, evidence.changed) if evidence.scores is not None else None,
        engine_change=evidence.engine_change,
    )


def positions_of(requests: Iterable[Observed]) -> Positions:
    return combined(["first" if one.by_first else "all" for one in requests])


def _moved(queries: QueryChange | None) -> bool | None:
    if queries is None:
        return None
    if queries.p_value <= LEVEL:
        return True
    enough = min(queries.requests_before, queries.requests_after) >= ENOUGH_QUERIES
    as_before = queries.p_value > LOOKS_AS_BEFORE
    return False if as_before and enough and queries.would_be_seen else None


def _compared(evidence: Evidence, *, is_warm: bool) -> ProbeChange | None:
    """The prompts as they were asked first, or again at once."""
    sides = [
        [one for one in side if one.is_warm == is_warm]
        for side in (evidence.probes_before, evidence.probes_after)
    ]
    return probes.compare(sides[0], sides[1], downward=evidence.direction != "up")


def _behaviour(change: ProbeChange | None, towards: float) -> Behaviour | Literal["none"]:
    return probes.behaviour(change, towards) if change else "none"


def _probed(
    changes: Sequence[ProbeChange], before: Sequence[Observed], after: Sequence[Observed]
) -> tuple[float, Difference | None]:
    """(part of the requests that are like the canary prompts, the change among these)."""
    if not changes or not after:
        return 1.0, None
    longest = max((one.longest for one in changes if one.longest is not None), default=None)
    most_cached = max(one.most_cached for one in changes)

    def is_probed(one: Observed) -> bool:
        longer = longest is not None and (one.prompt_tokens or 0) > longest
        return not longer and (one.cached_share or 0.0) <= most_cached + PROBED_CACHE

    part = sum(map(is_probed, after)) / len(after)
    return part, slices.change_among(before, after, is_probed) if part < PROBED_PART else None
