"""Requests with all that a source can tell: lengths, cached tokens, times, the age of the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from driftguard.diagnosis import Observed

HOUR = 3_600.0
SEGMENTS = ("code", "german", "rare")
SHARES = (0.5, 0.42, 0.08)


def served(
    seed: int,
    count: int,
    rate: Callable[[str, int, float, float], float] = lambda *_: 0.7,
    *,
    hours: tuple[float, float] = (-20.0, 0.0),
    starts: Sequence[float] = (-100.0,),
    step_seconds: float = 0.01,
    concurrency: tuple[int, int] = (2, 9),
    first: Callable[[float], float] = lambda rate: rate,
    lengths: tuple[int, int] = (50, 4_000),
) -> tuple[Observed, ...]:
    """`rate` of (segment, prompt tokens, cached share, hours since the start of the server) is the level
    around which sessions (sd .08) of one to four turns differ; `starts` of the server, in hours."""
    random = np.random.default_rng(seed)
    found: list[Observed] = []
    while len(found) < count:
        segment = str(random.choice(SEGMENTS, p=SHARES))
        session, of_session = f"{seed}-{len(found)}", float(random.normal(0.0, 0.08))
        prompt = int(random.integers(*lengths))
        for turn in range(int(random.integers(1, 5))):
            at = float(random.uniform(*hours))
            start = max(one for one in starts if one <= at)
            cached = 0.85 if turn else 0.0
            level = rate(segment, prompt, cached, at - start) + of_session
            level = float(np.clip(random.normal(level, 0.05), 0.01, 0.99))
            steps = int(random.integers(15, 60))
            accepted = int(random.binomial(4 * steps, level))
            found.append(
                Observed(
                    segment=segment,
                    steps=steps,
                    drafted=4 * steps,
                    accepted=accepted,
                    num_speculative_tokens=4,
                    acceptance_rule="rejection",
                    temperature=0.7,
                    concurrency=int(random.integers(*concurrency)),
                    first_drafted=steps,
                    first_accepted=int(random.binomial(steps, first(level))),
                    prompt_tokens=prompt,
                    cached_tokens=int(cached * prompt),
                    output_tokens=accepted + steps,
                    time_per_output_token_seconds=step_seconds * steps / (accepted + steps),
                    session=session,
                    ended_at=at * HOUR,
                    server_started_at=start * HOUR,
                )
            )
    return tuple(sorted(found[:count], key=lambda one: one.ended_at or 0.0, reverse=True))
