"""Time to first token of a prompt whose beginning a slot holds, beside one of which it holds nothing."""

from __future__ import annotations

import random
import statistics
from datetime import UTC, datetime

from driftguard_engine.core import Request, SamplingParams
from driftguard_engine.engine import Engine

from tests.gpu.check.loop.serving import ServingFailed
from tests.gpu.check.rows import PrefixTime

OWN_TOKENS, PAIRS, SEED = 12, 7, 20283
CHUNKS = 8  # of what prompts share


def time_prefixes(engine: Engine, shared_tokens: int, pairs: int = PAIRS) -> PrefixTime:
    """In turn, two prompts that begin alike, alone in the engine: medians. Raises ServingFailed."""
    draw, new, known, reused = random.Random(SEED), [], [], 0
    for pair in range(pairs + 1):
        shared = _tokens(engine, draw, shared_tokens)
        first, _ = _first_token(engine, shared + _tokens(engine, draw, OWN_TOKENS))
        second, reused = _first_token(engine, shared + _tokens(engine, draw, OWN_TOKENS))
        if pair:  # the first one warms up
            new.append(1e3 * first)
            known.append(1e3 * second)
    prompt_tokens = shared_tokens + OWN_TOKENS
    return PrefixTime(prompt_tokens, reused, statistics.median(new), statistics.median(known))


def _tokens(engine: Engine, draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(len(engine.tokenizer)) for _ in range(count)]


def _first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds, and how many of the prompt's tokens were reused."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    engine.submit(Request("prefix", tuple(prompt), params, datetime.now(UTC)))
    while engine.has_work():
        for output in engine.step():
            if (done := output.finished) is not None:
                if done.time_to_first_token_seconds is None:
                    raise ServingFailed(f"a prompt gave no token: {done.error or done.finish_reason}")
                return done.time_to_first_token_seconds, done.reused_prompt_tokens
    raise ServingFailed("a prompt gave no token")
