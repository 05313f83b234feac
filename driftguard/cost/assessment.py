"""What a stream's speculation costs now, what it lost, which K would be best, and what limits that."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from driftguard.cost.best_k import Model, best, implausible
from driftguard.cost.times import (
    LEAST_REQUESTS,
    LEVEL,
    UNKNOWN_BAND,
    Floats,
    Ints,
    Sample,
    TimedRequest,
    band_text,
    concurrency_of,
    fit,
    lost,
    matched,
    measured,
    one_label,
    sample_of,
    seen_ks,
    standardised,
    step_time,
)
from driftguard.cost.tokens_per_step import chain_of
from driftguard.records.documents.cost import Cost, Interval, LoadSpeedup, Speed

ENOUGH: Final = "one in a hundred and at least ten a day, under the usual load"
IMPLAUSIBLE: Final = (
    "a step takes less time with more draft tokens, so the requests of different K differ in something else "
    "too, and no best K is told: send requests of each K in the same hours"
)
_IN_USE: Final = 100  # newest requests with drafts: of most of their steps are the K in use and the load now
_SAME_HOURS: Final = 86_400.0  # seconds


def assess(
    before: Sequence[TimedRequest],
    now: Sequence[TimedRequest],
    without: Sequence[TimedRequest],
    *,
    changed: Collection[str] | None = None,
) -> Cost | None:
    """The cost of speculation in the requests of `now`; None where fewer than ten of them were timed.

    before: requests of the stream before a change, if there was one. without: requests of the same server
    and target without speculation. changed: segments whose speed is told, all by default; K is one for the
    whole stream, so the best K is of all of `now`. K in use and the load are those of the newest requests,
    so that a K set anew and a server that has filled up are known at once. Seconds per step change with the
    machine and its load, so the best K and the speedups are told from the requests, before and now, of the
    last day only. Times that were not measured (`times.measured`) say how fast the requests are said to be,
    and nothing else; `notes` then tells it.
    """
    newest = sample_of(now)
    clocked = [measured(side) for side in (before, now, without)]
    past, current = map(sample_of, clocked[:2])
    found = _speeds(_of(past, changed), _of(current, changed))
    told = _of(newest, changed)
    if found is None and len(told) >= LEAST_REQUESTS:
        found = Cost(_speed_of(told))
    if found is not None and len(current) < len(newest):
        found = replace(found, notes=(PARTLY_MEASURED if len(_of(current, changed)) else UNMEASURED,))
    speculating = newest[newest.k >= 1][-_IN_USE:]
    k = _usual(speculating, speculating.k, least=1)
    if found is None or k is None:
        return found
    own = newest[newest.k == k]
    present = speculating[speculating.k == k]
    band = _usual(present, present.band, least=UNKNOWN_BAND)
    found = replace(
        found, num_speculative_tokens=k, acceptance_rate=float(own.accepted.sum() / own.drafted.sum())
    )
    since = max(item.ended_at for item in now) - _SAME_HOURS
    timed = sample_of([item for side in clocked for item in side if item.ended_at >= since])
    if band is not None and len(timed):
        found = replace(found, loads=_by_load(newest, timed, k, band))
    return _with_best(found, newest, timed[timed.band == band], band)


def _with_best(found: Cost, newest: Sample, timed: Sample, band: int | None) -> Cost:
    """`timed`: requests of every K in the band of concurrency that there is now."""
    k = found.num_speculative_tokens
    seen = seen_ks(timed)
    ks = [item.num_speculative_tokens for item in seen]
    if k is None or k not in ks:
        return found
    found = replace(found, notes=(*found.notes, *limits(ks, band, k)))
    line = fit(timed, seen)
    if line is None:
        return found
    if implausible(line):
        return replace(found, notes=(*found.notes, IMPLAUSIBLE))
    chain = chain_of(newest, k)
    model = Model(chain, line, k)
    choices = model.choices()
    best_k, sure = best(model, choices)
    return replace(
        found,
        step_time=step_time(line, seen),
        choices=choices,
        best=best_k,
        sure=sure,
        break_even_acceptance=model.break_even(newest[newest.k == k]),
        notes=found.notes if chain.per_position else (*found.notes, ALIKE),
    )


def _by_load(newest: Sample, timed: Sample, k: int, now: int) -> tuple[LoadSpeedup, ...]:
    """Speculation with the K in use against none at each load by itself, the quietest first.

    One draft pays on a quiet server and loses on a busy one, at the same acceptance (vllm#26504): a step of a
    busy server computes every draft token, a quiet one has them nearly for free. Per band of concurrency

        factor = (L(K) / t(K)) / (1 / t(0))

    L: tokens per step, of the newest requests at any load, as acceptance does not follow it. t: seconds per
    step, fitted in that band alone. Nothing is carried from one band to another: a load at which no request
    without speculation was timed has no factor.

    `timed`: requests of every K and load, of one day; `now`: the band of the load that
    there is now, which is always among them; `k`: in use.
    """
    bands = sorted({now, *np.unique(timed.band[timed.k == k]).tolist()})
    return tuple(_at_load(newest, timed[timed.band == band], k, band, now=band == now) for band in bands)


def _at_load(newest: Sample, timed: Sample, k: int, band: int, *, now: bool) -> LoadSpeedup:
    found = LoadSpeedup(
        concurrency=concurrency_of(band),
        now=now,
        requests=int((timed.k == k).sum()),
        requests_without=int((timed.k == 0).sum()),
    )
    seen = seen_ks(timed)
    ks = [item.num_speculative_tokens for item in seen]
    if k not in ks:
        return replace(found, missing=_too_few(found.requests, f"with K = {k}", band))
    if 0 not in ks:
        few = _too_few(found.requests_without, "without speculation", band)
        return replace(found, missing=f"{few}: send some, {ENOUGH}")
    line = fit(timed, seen)
    if line is None or implausible(line):
        return replace(found, missing=IMPLAUSIBLE)
    chain = chain_of(newest, k)
    gain = Model(chain, line, k).gain(k, 0, LEVEL)
    tokens, _ = chain.tokens(k)
    return replace(
        found,
        factor=Interval(1.0 + gain.value, 1.0 + gain.low, 1.0 + gain.high),
        tokens_per_second=tokens / line.at(k),
        tokens_per_second_without=1.0 / line.at(0),
    )


def _too_few(count: int, which: str, band: int) -> str:
    counted = {0: f"no request {which} was", 1: f"only 1 request {which} was"}
    told = counted.get(count, f"only {count} requests {which} were")
    where = "" if band == UNKNOWN_BAND else f" at a concurrency of {band_text(band)}"
    return f"{told} timed{where}"


def _speeds(before: Sample, now: Sample) -> Cost | None:
    if len(now) < LEAST_REQUESTS:
        return None
    pair = matched(before, now)
    if pair is None:
        return Cost(_speed_of(now))
    return Cost(
        _speed(pair.after, pair.after_stratum, pair.weight),
        _speed(pair.before, pair.before_stratum, pair.weight),
        lost(pair),
    )


def _speed_of(sample: Sample) -> Speed:
    return _speed(sample, one_label(len(sample)), np.ones(1))


def _speed(sample: Sample, stratum: Ints, weight: Floats) -> Speed:
    times = sample.seconds_per_token
    per_token = standardised(times, np.ones_like(times), stratum, weight)
    none = sample.k == 0  # a step is a token then, whether or not the server counts steps
    tokens = np.where(none, sample.timed_steps, sample.emitted)
    steps = np.where(none, sample.timed_steps, sample.steps)
    return Speed(
        tokens_per_second=1.0 / per_token,
        time_per_output_token_seconds=per_token,
        tokens_per_step=standardised(tokens, steps, stratum, weight),
        seconds_per_step=standardised(sample.seconds, sample.timed_steps, stratum, weight),
        requests=len(sample),
    )


def _of(sample: Sample, segments: Collection[str] | None) -> Sample:
    return sample if segments is None else sample[np.isin(sample.segment, list(segments))]


def _usual(sample: Sample, values: Ints, *, least: int) -> int | None:
    """Of the values from `least` on the one with most steps."""
    chosen = values >= least
    if not chosen.any():
        return None
    names, places = np.unique(values[chosen], return_inverse=True)
    return int(names[np.bincount(places, weights=sample.timed_steps[chosen]).argmax()])


ALIKE: Final = (
    "the records do not tell which positions were accepted, so each is taken to be accepted alike: "
    "send accepted_per_position"
)
UNMEASURED: Final = (
    "the time per output token never varies in these requests, so it was not measured: "
    "no loss and no best K is told from them, and a loss is told by formula"
)
PARTLY_MEASURED: Final = (
    "the time per output token never varies in some of these requests, so it was not measured there: "
    "loss and best K are told from the others"
)


def limits(ks: Sequence[int], band: int | None, k: int) -> tuple[str, ...]:
    """What the K that were seen, in order, and the band of concurrency leave open."""
    notes = []
    if band is None or band == UNKNOWN_BAND:
        notes.append("the records do not tell the concurrency, so times under different load are mixed")
    else:
        notes.append(f"seconds per step are those at a concurrency of {band_text(band)}")
    if len(ks) < 2:
        notes.append(
            f"only K = {k} was timed, so neither the best K nor the break-even is known: "
            f"send some requests with another K and some without speculation, {ENOUGH}"
        )
    elif 0 not in ks:
        notes.append(
            "no request without speculation was timed, so whether speculation pays is not known: "
            f"send some, {ENOUGH}"
        )
    elif len(ks) == 2:
        notes.append(
            f"seconds per step at other K lie on a straight line through K = 0 and K = {k}: "
            "send some requests with another K to be sure of the best"
        )
    return tuple(notes)
