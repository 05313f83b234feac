"""Evidence of simulated changes: each scenario is what the sidecar would have read from the database."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from driftguard.diagnosis import Captured, Evidence, Observed, ProbeResult

K = 4
SEGMENTS = ("code", "german")


def requests(
    seed: int,
    counts: dict[str, int],
    rates: dict[str, float],
    *,
    k: int = K,
    temperature: float | None = 1.0,
    concurrency: int | None = 4,
    first_rate: float | None = None,
    verification: str = "unknown",
) -> tuple[Observed, ...]:
    """`counts` requests per segment whose acceptance varies (sd .1) around `rates`."""
    random = np.random.default_rng(seed)
    found = []
    for segment, count in counts.items():
        for _ in range(count):
            rate = float(np.clip(random.normal(rates[segment], 0.1), 0.02, 0.98))
            steps = int(random.integers(10, 40))
            accepted = int(random.binomial(steps * k, rate))
            first = int(random.binomial(steps, rate if first_rate is None else first_rate))
            found.append(
                Observed(
                    segment=segment,
                    steps=steps,
                    drafted=steps * k,
                    accepted=accepted,
                    num_speculative_tokens=k,
                    acceptance_rule="rejection",
                    verification=verification,
                    temperature=temperature,
                    concurrency=concurrency,
                    first_drafted=steps,
                    first_accepted=first,
                )
            )
    return tuple(found)


def probes(shift: float = 0.0, *, prompts: int = 20, answers: str = "same") -> tuple[ProbeResult, ...]:
    """One replay of every prompt, each with an acceptance of its own, shifted by `shift`."""
    random = np.random.default_rng(5)
    levels = random.uniform(0.4, 0.9, prompts)
    return tuple(
        ProbeResult(f"p{number}", answers, 200, round(200 * float(np.clip(level + shift, 0, 1))))
        for number, level in enumerate(levels)
    )


def captures(
    seed: int,
    segment: str,
    count: int,
    tokens: tuple[int, int],
    *,
    output: Sequence[int] | None = None,
) -> tuple[Captured, ...]:
    """Prompts whose token ids come from a range: another range is another topic."""
    random = np.random.default_rng(seed)
    return tuple(
        Captured(
            record_id=f"{segment}-{seed}-{number}",
            segment=segment,
            prompt=tuple(random.integers(*tokens, 30).tolist()),
            output=tuple(random.integers(0, 5_000, 60).tolist() if output is None else output),
        )
        for number in range(count)
    )


CODE, GERMAN, LEGAL = (0, 400), (500, 900), (1_000, 1_400)
BEFORE = requests(1, {"code": 200, "german": 200}, {"code": 0.75, "german": 0.7})
CAPTURED_BEFORE = captures(1, "code", 60, CODE) + captures(2, "german", 60, GERMAN)


def fell(**more: object) -> Evidence:
    """German fell from .70 to .45 and everything else stayed; `more` overrides fields."""
    values: dict[str, object] = {
        "direction": "down",
        "changed": ("german",),
        "before": BEFORE,
        "after": requests(2, {"code": 60, "german": 60}, {"code": 0.75, "german": 0.45}),
    }
    return Evidence(**{**values, **more})  # type: ignore[arg-type]
