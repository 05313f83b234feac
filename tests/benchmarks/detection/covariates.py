"""Simulated requests whose acceptance follows something that their records tell (or do not): the temperature,
K, the hour, the day of the week. Nothing else changes.

An answer's length is drawn first and does not follow from acceptance. The temperature, K and what the load
does to it wander as `dependent.py` has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from driftguard.detection import ObservationBatch
from tests.benchmarks.detection.dependent import Floats, Random, beta, wander
from tests.detection.traffic import BETWEEN_REQUESTS, wandering_mix

Draw = Callable[[Random, int], ObservationBatch]

MONDAY = 1_699_833_600.0  # 13 November 2023, 0:00 UTC
SECONDS_PER_DAY = 86_400.0
MEAN = 0.6
TEMPERATURES = np.array([0.2, 0.7, 1.0])
AT_TEMPERATURE = np.array([0.68, 0.6, 0.5])  # mean acceptance at each
LARGEST_K = 8
OF_A_TOKEN, BETWEEN_TOKENS = 0.72, 0.09  # mean of a request's acceptance of one draft token, and its spread
LOAD_MEMORY = 300.0  # requests
Told = Literal["K", "positions", "both", "neither"]


@dataclass(frozen=True, slots=True)
class Covariate:
    name: str
    draw: Draw

    def batch(self, seed: list[int], n: int) -> ObservationBatch:
        return self.draw(np.random.default_rng(seed), n)


def _requests(rng: Random, mean: Floats, ended_at: Floats) -> ObservationBatch:
    n = len(mean)
    drafted = rng.integers(20, 200, n)
    accepted = rng.binomial(drafted, beta(rng, mean, BETWEEN_REQUESTS))
    return ObservationBatch.of(
        np.arange(1, n + 1),
        ["default"] * n,
        drafted,
        accepted,
        ended_at,
        output_tokens=rng.integers(30, 400, n),
    )


def _every_second(n: int) -> Floats:
    return MONDAY + np.arange(1, n + 1, dtype=np.float64)


def _temperatures(rng: Random, n: int) -> ObservationBatch:
    code = wandering_mix(rng, n, ["", "", ""])[1]
    batch = _requests(rng, AT_TEMPERATURE[code], _every_second(n))
    return replace(batch, temperature=TEMPERATURES[code], acceptance_rule=["rejection"] * n)


def _prompts(rng: Random, n: int) -> ObservationBatch:
    """1,000 a day. Long prompts accept less, cached ones more; their shares follow days of their own."""
    days = np.arange(n) / 1_000
    long = rng.random(n) < 0.5 + 0.35 * np.sin(2.0 * np.pi * (days / 3.7 + rng.random()))
    cached = long & (rng.random(n) < 0.5 + 0.4 * np.sin(2.0 * np.pi * (days / 5.3 + rng.random())))
    batch = _requests(rng, MEAN - 0.1 * long + 0.06 * cached, MONDAY + SECONDS_PER_DAY * days)
    tokens = np.where(long, rng.integers(4_000, 8_000, n), rng.integers(20, 400, n))
    return replace(batch, prompt_tokens=tokens, cached_tokens=np.where(cached, tokens * 3 // 4, 0))


def _varying_k(told: Told, of_acceptance: float) -> Draw:
    """K falls with the load, and rises with what the request's own tokens are accepted with."""

    def draw(rng: Random, n: int) -> ObservationBatch:
        q = beta(rng, np.full(n, OF_A_TOKEN), BETWEEN_TOKENS)
        seen = q - OF_A_TOKEN + rng.normal(0.0, 0.04, n)  # of a request, by a server that chooses its K
        wanted = 4.0 - 1.5 * wander(rng, n, LOAD_MEMORY) + of_acceptance * seen
        k = np.clip(np.rint(wanted), 1, LARGEST_K).astype(np.int64)
        length = rng.integers(30, 400, n)
        expected = q * (1.0 - q**k) / (1.0 - q)  # accepted per step
        steps = np.maximum(np.rint(length / (1.0 + expected)), 1).astype(np.int64)
        accepted, first, left = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64), steps
        for position in range(LARGEST_K):
            left = np.where(k > position, rng.binomial(left, q), 0)
            accepted += left
            first = left if position == 0 else first
        given = zip(steps.tolist(), first.tolist(), strict=True)
        return ObservationBatch.of(
            np.arange(1, n + 1),
            ["default"] * n,
            steps * k,
            accepted,
            _every_second(n),
            num_speculative_tokens=k if told in ("K", "both") else (),
            output_tokens=length,
            first_position=list(given) if told in ("positions", "both") else (),
        )

    return draw


def _calendar(per_day: int, *, weekend: float, wave: float) -> Draw:
    """So many requests a day from any hour of any day on; at weekends and at night the mean is lower."""

    def draw(rng: Random, n: int) -> ObservationBatch:
        days = 7.0 * rng.random() + np.arange(n) / per_day
        at_weekend: NDArray[np.bool_] = days % 7.0 >= 5.0
        mean = MEAN - weekend * at_weekend + wave * np.sin(2.0 * np.pi * days)
        return _requests(rng, mean, MONDAY + SECONDS_PER_DAY * days)

    return draw


COVARIATES = (
    Covariate("temperatures .2 / .7 / 1, told, their mix shifts", _temperatures),
    Covariate("K told, follows load and acceptance, no positions", _varying_k("K", 20.0)),
    Covariate("K and positions told, K follows load and acceptance", _varying_k("both", 20.0)),
    Covariate("K follows load, neither K nor positions told", _varying_k("neither", 0.0)),
    Covariate("K follows load and acceptance, positions told", _varying_k("positions", 20.0)),
    Covariate("weekends lower by .05, 600 a day", _calendar(600, weekend=0.05, wave=0.0)),
    Covariate("daily wave of .05, 1,000 a day", _calendar(1_000, weekend=0.0, wave=0.05)),
    Covariate("daily wave of .05, 5,000 a day", _calendar(5_000, weekend=0.0, wave=0.05)),
    Covariate("prompts, told, lower by .10 where long, by .04 where cached too; their mix wanders", _prompts),
)
