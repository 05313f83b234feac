"""What the engine says of its cache, from any thread."""

from __future__ import annotations

from collections.abc import Callable

from driftguard_engine.engine import Engine

from tests.engine.core.tiny import drain, request


def test_cached_tokens_are_prompt_and_output_of_the_requests_that_run(
    new_engine: Callable[..., Engine],
) -> None:
    engine = new_engine(max_batch=2)
    for name in "abc":
        engine.submit(request(name, prompt=(5, 6, 7)))
    assert engine.cached_tokens == 0
    emitted = sum(len(output.token_ids) for output in engine.step())
    assert emitted > 0
    assert engine.cached_tokens == 2 * 3 + emitted
    drain(engine)
    assert engine.cached_tokens == 0
