"""Block verification on the bundled pair: it pays, step for step."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from driftguard_engine.core import Request, SamplingParams
from driftguard_engine.engine import Engine
from driftguard_engine.options import (
    LimitOptions,
    ModelOptions,
    ServerOptions,
    VerificationName,
    engine_config,
)

from tests.engine.core.tiny import drain, finished

pytestmark = pytest.mark.slow


def accepted_per_step(rule: VerificationName) -> float:
    models = ModelOptions(verification=rule, num_speculative_tokens=8, threads=1)
    engine = Engine(engine_config(models, LimitOptions(max_length=256), ServerOptions()))
    for seed in range(32):
        prompt = tuple(engine.tokenizer.encode(f"Story {seed}. Once upon a time there was a"))
        params = SamplingParams(max_tokens=60, seed=seed, ignore_eos=True)
        engine.submit(Request(str(seed), prompt, params, datetime.now(UTC)))
    counts = [each.counts for each in finished(drain(engine)).values()]
    steps = sum(each.steps for each in counts)
    assert steps > 300
    return sum(each.accepted for each in counts) / steps


def test_blocks_accept_more_of_the_bundled_draft() -> None:
    token, block = map(accepted_per_step, VerificationName)
    print(f"accepted per step: {token:.3f} by tokens, {block:.3f} by blocks")
    assert block > token
