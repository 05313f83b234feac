"""A segment under another name: the detector learns its baseline anew and would not see that it fell.

When a segment has its first baseline, it is looked for a segment that fell silent when it appeared, and is
like it. Both are then compared: by the first draft token where K changed as well. A segment that was already
fallen as its name changed is compared as it was before it fell. Whether it has come back is looked for in
`found_back.py`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID, uuid5

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from driftguard.diagnosis import comparisons
from driftguard.diagnosis.comparisons import LEVEL, Rate, acceptance_of
from driftguard.incident_lifecycle import formula_slowdown
from driftguard.incidents import like_with_like
from driftguard.incidents.opening import ChangePoint, join, open_incident
from driftguard.records.documents.incident import ChangedSegment, IncidentEvidence
from driftguard.records.positions import ACCEPTANCE, Positions, combined
from driftguard.store import examination_evidence, folding, incidents, renamed_segments
from driftguard.store.renamed_segments import Arrived, Likeness
from driftguard.store.tables import AwaitedComparison, Incident

LOOK_BACK: Final = timedelta(days=7)
NEWEST_REQUESTS: Final = 200_000  # of a stream, in which a name has to have taken the other one's place
SHARE_REQUESTS: Final = 2_000  # at least, before the new name, to tell the share of the old one
RECENT: Final = timedelta(days=1)  # names that appeared so long before the newest baseline began, at most
BY_CHANCE: Final = 0.001  # below: the silence of a segment is none of chance
ROLLOUT: Final = 0.1  # of the requests under the new name may come before the last one under the old
SHARE_RATIO: Final = 1.25  # shares of the traffic that lie closer are alike
LENGTH_DEVIATIONS: Final = 0.5  # logarithms of lengths whose means lie closer, in standard deviations, too
_NAMESPACE: Final = UUID("6a1d3c0e-64a5-4c1f-8f60-7d0f3b0d5a11")


@dataclass(frozen=True, slots=True)
class Renamed:
    """Old names that may have become these new ones: one each, unless several are alike.

    `before`, `after`: mean acceptance per request, of all draft positions at equal settings or of the first
    (`positions`); `acceptance`: of each new name.
    """

    old: tuple[str, ...]
    new: tuple[str, ...]
    before: Rate
    after: Rate
    acceptance: tuple[Rate, ...]
    positions: Positions = "all"


def fallen(session: Session, awaited: AwaitedComparison, minimum_drop: float) -> list[Renamed]:
    """Segments that accept less under their new name than under the old one, by `minimum_drop` at least and
    shown at 1%.

    A segment was renamed where the old name has been silent since about the time when the new one appeared,
    by more than chance, both have a like share of the traffic, and like lengths of answers and prompts. Where
    several could have become one another, they are compared together. Settings are compared with equal ones.
    Welch's test with Bonferroni's correction, its errors inflated as the detector found for the stream.
    """
    since = awaited.reference_since - LOOK_BACK
    appeared = renamed_segments.appeared(session, awaited.stream_id)
    heard = renamed_segments.heard(session, awaited.stream_id, since)
    names = [one for one in heard if one.segment in appeared]  # not "other", which is many
    if len(names) < 2:
        return []
    older = renamed_segments.known_before(session, awaited.stream_id, since)
    orders = _orders(session, awaited.stream_id)
    pairs = [
        (old.segment, new.segment)
        for new in names
        if new.segment not in older and new.first > awaited.reference_since - RECENT
        for old in names
        if appeared[old.segment] < appeared[new.segment]
        and any(_took_its_place(places, old.segment, new.segment) for places in orders)
    ]
    if not pairs:
        return []
    asked = {name for pair in pairs for name in pair}
    of_older = like_with_like.levels(session, awaited.stream_id, {old for old, _ in pairs}, since)
    news = {new for _, new in pairs}
    of_newer = like_with_like.levels(session, awaited.stream_id, news, since, are_newer=True)
    alike = [
        _Pair(old, new, both, by_first)
        for old, new in pairs
        for both in [like_with_like.at_equal_settings(of_older[old], of_newer[new])]
        for by_first in [like_with_like.by_first(of_older[old], of_newer[new])]
        if (of_lengths := both or by_first) and lengths_alike(*of_lengths)
    ]
    inflations = folding.variance_inflations(session, awaited.stream_id, asked)
    groups = [_together(group, inflations) for group in _groups(alike)]
    return [
        group
        for group in groups
        if group is not None
        and group.after.rate <= group.before.rate - minimum_drop
        and comparisons.difference(group.before, group.after).p_value <= LEVEL / len(groups)
    ]


@dataclass(frozen=True, slots=True)
class _Places:
    """Of the newest requests of a stream in some order: how many there are, and the places of each segment's,
    rising."""

    total: int
    of_segment: Mapping[str, NDArray[np.int64]]


def has_taken_a_place(
    session: Session, stream_id: int, silent: Collection[str], young: Collection[str]
) -> bool:
    """Whether one of the `young` segments has taken the place of one of the `silent` ones, whatever either
    accepts."""
    orders = _orders(session, stream_id)
    appeared = renamed_segments.appeared(session, stream_id)
    return any(
        appeared[old] < appeared[new] and _took_its_place(places, old, new)
        for places in orders
        for old in silent
        for new in young
        if old in appeared and new in appeared
    )


def of_next_stream(session: Session, past_id: int, stream_id: int) -> dict[str, str]:
    """Of a stream that took the place of another one: new name -> old name, of segments with a like share of
    the newest requests of either, of which the other stream has none by more than chance. Only where there is
    one new name for an old one, and one old name for a new one."""
    sides = [renamed_segments.newest(session, one, SHARE_REQUESTS) for one in (past_id, stream_id)]
    counts = [Counter(one.segment for one in side) for side in sides]
    totals = [len(side) for side in sides]
    known = [renamed_segments.appeared(session, one) for one in (past_id, stream_id)]
    pairs = [
        (old, new)
        for old in known[0].keys() & counts[0].keys() - known[1].keys()
        for new in known[1].keys() & counts[1].keys() - known[0].keys()
        if _chance_of_silence(counts[0][old] / totals[0], totals[1]) <= BY_CHANCE
        and _chance_of_silence(counts[1][new] / totals[1], totals[0]) <= BY_CHANCE
        and _shares_alike((counts[0][old], totals[0]), (counts[1][new], totals[1]))
    ]
    olds, news = (Counter(pair[side] for pair in pairs) for side in (0, 1))
    return {new: old for old, new in pairs if olds[old] == news[new] == 1}


def _orders(session: Session, stream_id: int) -> list[_Places]:
    """By arrival, and by the clock."""
    newest = renamed_segments.newest(session, stream_id, NEWEST_REQUESTS)
    return [_places(newest), _places(sorted(newest, key=lambda one: (one.ended_at, one.seq)))]


def _places(requests: Sequence[Arrived]) -> _Places:
    places: dict[str, list[int]] = defaultdict(list)
    for place, one in enumerate(requests):
        places[one.segment].append(place)
    return _Places(len(requests), {name: np.array(own) for name, own in places.items()})


def _took_its_place(places: _Places, old: str, new: str) -> bool:
    """Has `old` been silent since about when `new` appeared, which has a like share of the traffic?

    Places in the order of arrival are not moved by a clock that is set, nor by hours in which nothing is
    sent; those in the order of the clock not by records that a sender kept back. Either may show it."""
    none = np.zeros(0, dtype=np.int64)
    ours, theirs = (places.of_segment.get(name, none) for name in (old, new))
    if not len(ours) or not len(theirs):
        return False
    begun, ended = int(theirs[0]), int(ours[-1])
    since = places.total - begun
    start = max(begun - max(since, SHARE_REQUESTS), 0)
    before = int(((ours >= start) & (ours < begun)).sum())
    if before == 0:
        return False
    share = before / (begun - start)
    if _chance_of_silence(share, places.total - 1 - ended) > BY_CHANCE:
        return False
    if ended < begun and _chance_of_silence(share, begun - ended - 1) <= BY_CHANCE:
        return False
    if (theirs < ended).sum() > ROLLOUT * len(theirs):
        return False
    return _shares_alike((before, begun - start), (len(theirs), since))


def _chance_of_silence(share: float, requests: int) -> float:
    """Of a segment with this share of the traffic, among so many requests that are drawn independently."""
    return float((1.0 - share) ** requests)


def _shares_alike(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """Do two shares (requests, of how many) differ by less than SHARE_RATIO, or than is shown at 1%?"""
    old, new = (own / total for own, total in (before, after))
    if max(old, new) < SHARE_RATIO * min(old, new):
        return True
    error = math.sqrt(old * (1.0 - old) / before[1] + new * (1.0 - new) / after[1])
    return comparisons.interval(new - old, error, math.inf).p_value > LEVEL


def lengths_alike(old: Likeness, new: Likeness) -> bool:
    """Are answers and prompts as long, where both tell them? Answers may be shorter because less was
    accepted: not only a difference that cannot be shown counts as none."""
    answers = ((each.answers, each.answer_mean, each.answer_variance) for each in (old, new))
    prompts = ((each.prompts, each.prompt_mean, each.prompt_variance) for each in (old, new))
    return _near(*answers) and _near(*prompts)


def _near(old: tuple[int, float, float], new: tuple[int, float, float]) -> bool:
    """(how many, mean, variance) of logarithms of lengths."""
    if min(old[0], new[0]) < like_with_like.LEAST_REQUESTS:
        return True
    deviation = math.sqrt((old[2] + new[2]) / 2.0)
    return abs(old[1] - new[1]) <= LENGTH_DEVIATIONS * deviation


@dataclass(frozen=True, slots=True)
class _Pair:
    """An old and a new name, at equal settings and by the first draft token, where both tell so."""

    old: str
    new: str
    equal: tuple[Likeness, Likeness] | None
    by_first: tuple[Likeness, Likeness] | None


def _groups(pairs: Sequence[_Pair]) -> list[list[_Pair]]:
    """Pairs that share a name, directly or by others, belong together."""
    groups: list[list[_Pair]] = []
    for pair in pairs:
        names = {pair.old, pair.new}
        touched = [group for group in groups if any(names & {other.old, other.new} for other in group)]
        groups = [group for group in groups if group not in touched]
        groups.append([*(other for group in touched for other in group), pair])
    return groups


def _together(group: Sequence[_Pair], inflations: Mapping[str, float]) -> Renamed | None:
    """Where it is not known which of several became which, those of either name weigh the same. Where one of
    them may just have ended or begun, the lowest old level stands against the highest new one. None where
    neither equal settings nor the first draft token compare them all."""
    positions: Positions = "all" if all(pair.equal for pair in group) else "first"
    sides = [
        (pair.old, pair.new, both)
        for pair in group
        if (both := pair.equal if positions == "all" else pair.by_first)
    ]
    if len(sides) < len(group):
        return None
    inflation = max(inflations[name] for old, new, _ in sides for name in (old, new))
    old = {name: both[0] for name, _, both in sides}
    new = {name: both[1] for _, name, both in sides}
    levels = [_rate([each], inflation) for _, each in sorted(new.items())]
    if len(old) == len(new):
        before, after = _rate(list(old.values()), inflation), _rate(list(new.values()), inflation)
    else:
        before = min((_rate([each], inflation) for each in old.values()), key=lambda level: level.rate)
        after = max(levels, key=lambda level: level.rate)
    return Renamed(tuple(sorted(old)), tuple(sorted(new)), before, after, tuple(levels), positions)


def _rate(levels: Sequence[Likeness], inflation: float) -> Rate:
    """The mean of the segments' means of accepted / drafted."""
    error = math.sqrt(inflation * sum(level.variance / level.requests for level in levels)) / len(levels)
    return Rate(
        sum(level.requests for level in levels),
        sum(level.drafted for level in levels),
        sum(level.mean for level in levels) / len(levels),
        error,
    )


def report(session: Session, awaited: AwaitedComparison, found: Sequence[Renamed], now: datetime) -> None:
    """Opens an incident, or has the one that is open already go on under the new names as well."""
    incident, reason = _incident(session, awaited, found, now)
    replaced = {name for group in found for name in group.old}
    known = incidents.unresolved_of(session, awaited.stream_id, "down")
    for one in known:
        one.segments = tuple(
            replace(each, back_at=incident.change_point_at)
            if each.segment in replaced and each.back_at is None
            else each
            for each in one.segments
        )
        join(session, one, incident.segments, ChangePoint.of(incident), reason, now)
    if not known:
        open_incident(session, incident, reason)


def _incident(
    session: Session, awaited: AwaitedComparison, found: Sequence[Renamed], now: datetime
) -> tuple[Incident, str]:
    """The incident of segments that fell, and why it opens."""
    names = sorted(name for group in found for name in group.new)
    newest = renamed_segments.newest(session, awaited.stream_id, NEWEST_REQUESTS)
    seq, at = next((one.seq, one.ended_at) for one in newest if one.segment in names)
    total = sum(group.after.requests for group in found)
    before = sum(group.before.rate * group.after.requests for group in found) / total
    after = sum(group.after.rate * group.after.requests for group in found) / total
    k = examination_evidence.usual_k(session, awaited.stream_id, at)
    positions = combined(group.positions for group in found)
    incident = Incident(
        id=uuid5(_NAMESPACE, f"{awaited.stream_id}/{'/'.join(names)}"),
        stream_id=awaited.stream_id,
        direction="down",
        opened_at=now,
        opened_seq=awaited.ready_seq,
        change_point_seq=seq,
        change_point_at=at,
        interval_start_at=at,
        interval_end_at=at,
        acceptance_before=before,
        acceptance_after=after,
        segments=tuple(_changes(found)),
        evidence=IncidentEvidence(
            slowdown_formula=formula_slowdown(before, after, k) if k and positions == "all" else None,
            num_speculative_tokens=k,
        ),
    )
    return incident, f"{_in_words(found)}: {ACCEPTANCE[positions]} fell from {before:.2f} to {after:.2f}"


def _in_words(found: Sequence[Renamed]) -> str:
    """For example: segment b took the place of a, with as much of the traffic and as long requests."""
    moves = [
        f"segment{'s' * (len(group.new) > 1)} {', '.join(group.new)} took the place of {', '.join(group.old)}"
        for group in found
    ]
    return f"{'; '.join(moves)}, with as much of the traffic and as long requests"


def _changes(found: Sequence[Renamed]) -> list[ChangedSegment]:
    """Of the new names; of several that are alike those below the level of the old ones."""
    return [
        ChangedSegment(
            name,
            acceptance_of(group.before, group.positions),
            acceptance_of(level, group.positions),
            renamed_from=group.old,
        )
        for group in found
        for name, level in zip(group.new, group.acceptance, strict=True)
        if level.rate < group.before.rate
    ]
