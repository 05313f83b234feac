"""The watch over a promoted draft: does it accept more than the old draft did, or less? A pure fold.

The old draft's acceptance is known per segment from its records: mean x = accepted / drafted per request,
with a standard error. Live requests of the promoted draft bet against two claims, with the bets of
driftguard.detection.statistics.bets (e >= .02, E[e] <= 1 under the claim, whatever the distribution of x):

    "no better here"   E[x | past] <= mean + 2 se                in one changed segment
    "not back here"    E[x | past] <= over_from                  in one changed segment
    "not half back"    E[x | past] <= half_from                  in one changed segment
    "not worse"        E[x | past] >= mean - 2 se - tolerance    in every segment

`over_from` is the level before the fall less what is left to be forgiven (`over_from`): a draft can be better
than the old one and still far from that. `half_from` is halfway between the old draft's level and that before
the fall.

The wealth of a bet is the product of its e over the requests so far, started once, at the promotion; bets
are averaged with equal weights. With an average of averages

    better_c = mean_j W_cj               worse = mean_j W_Gj / 2 + mean_c mean_j W_cj / 2

each is an e-process, so by Ville's inequality (Shin, Ramdas, Rinaldo 2023; Waudby-Smith, Ramdas 2024)
it ever reaches 1/ALPHA with probability at most ALPHA if its claim is true, however often one looks.

Guarantee: a draft that is not worse than the old one (by `tolerance`, in any segment) is rolled back with
probability at most ALPHA = 0.001 per promotion; an incident is declared recovered in part although some
changed segment is no better with probability at most ALPHA, because every changed segment must show it, and
likewise over, or half won back, although some changed segment accepts no more than its `over_from` or
`half_from`. Both must show recovery in part, too: of a small fall they lie within what is not known of the
old mean.
Assumptions: the old means lie within two standard errors of what was measured, and the traffic of a
segment stays as it was: a segment whose traffic changes for the worse during the watch counts against the
new draft. Segments in which the old draft had fewer than MINIMUM_OLD_REQUESTS are not judged: where one of
them has changed, the watch never calls the incident over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from driftguard.detection.statistics.bets import BETS, Floats, factors, mean_over_bets
from driftguard.records.documents.retraining_run import Decision, OldLevel, SegmentWatch, Watch

ALPHA = 0.001
WATCHED_REQUESTS = 2_000  # then the promotion stands
MINIMUM_OLD_REQUESTS = 30
FORGIVEN = 0.25  # part of a fall that may be left when it is called over
_LARGEST_WEALTH = 1e300  # a stored number must be finite


def over_from(before: float, after: float, minimum_drop: float) -> float:
    """The mean from which on a fall from `before` to `after` is over: what is left of it is less than a
    quarter, or less than the smallest fall that is watched for, `minimum_drop`."""
    return before - max(FORGIVEN * (before - after), minimum_drop)


def start(old: Sequence[OldLevel], tolerance: float, changed: Collection[str]) -> Watch:
    """A watch before its first request. changed: the segments of the incident."""
    ones = (1.0,) * BETS
    judged = [level for level in old if level.requests >= MINIMUM_OLD_REQUESTS]
    segments = tuple(SegmentWatch(level, 0, 0, 0, ones, ones, shown_better=False) for level in judged)
    unjudged = {*changed} - {level.segment for level in judged}
    return Watch(
        segments,
        ones,
        tolerance,
        0,
        0,
        recovered=False,
        verdict="watching",
        unjudged_segments=tuple(sorted(unjudged)),
    )


def fold(watch: Watch, requests: Iterable[tuple[str | None, int, int]]) -> Watch:
    """The watch after these (segment, drafted, accepted) of the promoted draft, in order; without a segment
    those that cannot be compared with the old draft's.

    Once the verdict is reached, later requests change nothing.
    """
    known: dict[str | None, int] = {part.old.segment: place for place, part in enumerate(watch.segments)}
    for name, drafted, accepted in requests:
        if watch.verdict != "watching":
            break
        if drafted == 0:
            continue
        if name in known:
            watch = _judge(watch, known[name], drafted, accepted)
        else:
            watch = replace(watch, unjudged_requests=watch.unjudged_requests + 1)
        watch = _conclude(watch)
    return watch


def _judge(watch: Watch, place: int, drafted: int, accepted: int) -> Watch:
    segment = watch.segments[place]
    x = np.array([accepted / drafted])
    margin = 2 * segment.old.standard_error
    variance = np.array([segment.old.variance])
    upper = np.clip([segment.old.mean + margin], 0.0, 1.0)
    lower = np.clip([segment.old.mean - margin - watch.tolerance], 0.0, 1.0)
    rise = factors(x, upper, variance, rise=True)[0]  # [BETS]
    fall = factors(x, lower, variance, rise=False)[0]
    better = _grown(segment.better, rise)
    shown_better = segment.shown_better or _evidence(better) >= 1 / ALPHA

    def back(wealth: tuple[float, ...], shown: bool, level: float | None) -> tuple[tuple[float, ...], bool]:
        if level is None:
            return wealth, shown
        beyond = factors(x, np.clip([level], 0.0, 1.0), variance, rise=True)[0]
        wealth = _grown(wealth or (1.0,) * BETS, beyond)
        return wealth, shown or _evidence(wealth) >= 1 / ALPHA

    over, shown_over = back(segment.over, segment.shown_over, segment.old.over_from)
    half, shown_half = back(segment.half, segment.shown_half, segment.old.half_from)
    judged = SegmentWatch(
        segment.old,
        segment.requests + 1,
        segment.drafted + drafted,
        segment.accepted + accepted,
        better,
        _grown(segment.worse, fall),
        shown_better,
        over,
        shown_over,
        half,
        shown_half,
    )
    segments = (*watch.segments[:place], judged, *watch.segments[place + 1 :])
    pooled = _grown(watch.pooled_worse, fall)
    return replace(watch, segments=segments, pooled_worse=pooled, requests=watch.requests + 1)


def _grown(wealth: tuple[float, ...], factor: Floats) -> tuple[float, ...]:
    return tuple(np.minimum(np.array(wealth) * factor, _LARGEST_WEALTH).tolist())


def _evidence(wealth: tuple[float, ...]) -> float:
    return float(mean_over_bets(np.array(wealth)))


def evidence_of_worse(watch: Watch) -> float:
    """The e-process of "worse"; 1/ALPHA rolls back."""
    if not watch.segments:
        return 0.0
    alone = sum(_evidence(segment.worse) for segment in watch.segments) / len(watch.segments)
    return (_evidence(watch.pooled_worse) + alone) / 2


def _conclude(watch: Watch) -> Watch:
    if evidence_of_worse(watch) >= 1 / ALPHA:
        return replace(watch, verdict="worse")
    changed = [segment for segment in watch.segments if segment.old.changed]
    recovered = watch.recovered or (bool(changed) and all(segment.shown_better for segment in changed))
    judges_all = not watch.unjudged_segments
    over = watch.over or (judges_all and recovered and all(_is_over(segment) for segment in changed))
    half = watch.half or (recovered and all(segment.shown_half for segment in changed))
    ended = watch.requests + watch.unjudged_requests >= WATCHED_REQUESTS
    return replace(
        watch, recovered=recovered, over=over, half=half, verdict="stands" if ended else "watching"
    )


def _is_over(segment: SegmentWatch) -> bool:
    """Of one that is shown better. Without a baseline that is all that can be shown."""
    return segment.shown_over or segment.old.over_from is None


def against(gate: Decision | None, part: SegmentWatch) -> str | None:
    """The 95% interval that the gate's held-out requests predict for as many live ones as there are, and
    whether acceptance lies below or above it; None where the gate did not compare the segment by itself."""
    names = [f"changed:{part.old.segment}"] + ([] if part.old.changed else [f"older:{part.old.segment}"])
    known = {one.group: one for one in gate.groups} if gate is not None else {}
    compared = next((known[name] for name in names if name in known), None)
    expected = compared.expected_range(part.requests) if compared and part.requests else None
    if expected is None or part.acceptance is None or part.old.by_first:
        return None
    low, high = expected
    where = "below the " if part.acceptance < low else "above the " if part.acceptance > high else ""
    return f"{where}{low:.2f} to {high:.2f} expected"


def describe(watch: Watch, gate: Decision | None) -> str:
    """Acceptance of the promoted draft per segment, against the old one's and the gate's prediction. For
    example: german 0.69 over 50 requests (the old draft: 0.41; 0.61 to 0.75 expected)."""
    parts = [
        f"{part.old.segment} {part.accepted / part.drafted:.2f}{_of_first(part)} "
        f"over {part.requests} requests "
        f"({'; '.join(filter(None, (f'the old draft: {part.old.mean:.2f}', against(gate, part))))})"
        for part in watch.segments
        if part.requests
    ]
    return ", ".join(parts) or "no requests of judged segments"


def _of_first(part: SegmentWatch) -> str:
    return " of the first draft token" if part.old.by_first else ""
