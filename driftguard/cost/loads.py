"""Speculation against none, at each load by itself: one draft pays on a quiet server and loses on a busy one.

A step of a busy server computes every draft token, a quiet one has them nearly for free. So acceptance stays
the same while what is right flips with the load (vllm#26504). Per band of concurrency, with the K in use,

    factor = (L(K) / t(K)) / (1 / t(0))

L: tokens per step, of the newest requests at any load (`tokens_per_step.py`), because acceptance does not
follow the load. t: seconds per step, fitted in that band alone (`times.py`). Nothing is carried from one
band to another: a load at which no request without speculation was timed has no factor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from driftguard.cost.best_k import Model, implausible
from driftguard.cost.times import LEVEL, UNKNOWN_BAND, Sample, band_text, concurrency_of, fit, seen_ks
from driftguard.cost.tokens_per_step import Chain
from driftguard.records.documents.cost import Interval, LoadSpeedup

ENOUGH: Final = "one in a hundred and at least ten a day, under the usual load"
IMPLAUSIBLE: Final = (
    "a step takes less time with more draft tokens, so the requests of different K differ in something else "
    "too, and no best K is told: send requests of each K in the same hours"
)


def by_load(chain: Chain, timed: Sample, k: int, now: int) -> tuple[LoadSpeedup, ...]:
    """The quietest first. `timed`: requests of every K and load, of one day; `now`: the band of the load that
    there is now, which is always among them; `k`: in use."""
    bands = sorted({now, *np.unique(timed.band[timed.k == k]).tolist()})
    return tuple(_at(chain, timed[timed.band == band], k, band, now=band == now) for band in bands)


def _at(chain: Chain, timed: Sample, k: int, band: int, *, now: bool) -> LoadSpeedup:
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
    model = Model(chain, line, k)
    gain = model.gain(k, 0, LEVEL)
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
