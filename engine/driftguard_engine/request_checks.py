"""The checks of a request before it is queued."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from driftguard_engine.core import MAX_STOP_STRINGS, InvalidRequest, SamplingParams

MAX_SEED = 2**63 - 1
MAX_TEMPERATURE = 100.0


def check_prompt(prompt: Sequence[int], *, max_length: int, vocabulary: int) -> None:
    """Raises InvalidRequest, which says what is wrong and what is allowed."""
    if not prompt:
        raise InvalidRequest("prompt: empty; at least one token is needed", field="prompt")
    if len(prompt) >= max_length:
        raise InvalidRequest(
            f"prompt: {len(prompt)} tokens, but the context is {max_length} and must hold one new token too",
            field="prompt",
        )
    # Without a call for each token: the server checks on the event loop.
    if set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < vocabulary:
        return
    wrong = next((token for token in prompt if not _whole(token, 0, vocabulary - 1)), None)
    if wrong is not None:
        raise InvalidRequest(
            f"prompt: {wrong!r} is not a token id; the vocabulary is 0 .. {vocabulary - 1}", field="prompt"
        )


def check_params(params: SamplingParams, max_speculative_tokens: int) -> None:
    """Raises InvalidRequest, which names the field, the value given and what is allowed."""
    _range(
        "max_tokens", params.max_tokens, _whole(params.max_tokens, 1, None), "a whole number of at least 1"
    )
    _range(
        "temperature",
        params.temperature,
        _number(params.temperature) and 0 <= params.temperature <= MAX_TEMPERATURE,
        f"a number from 0 to {MAX_TEMPERATURE:g}",
    )
    _range(
        "top_p", params.top_p, _number(params.top_p) and 0 < params.top_p <= 1, "a number above 0 and up to 1"
    )
    _range(
        "top_k",
        params.top_k,
        _whole(params.top_k, -1, 2**31 - 1),
        f"a whole number from 0 (off) to {2**31 - 1}",
    )
    _range("seed", params.seed, _whole(params.seed, 0, MAX_SEED), f"a whole number from 0 to {MAX_SEED}")
    _range(
        "num_speculative_tokens",
        params.num_speculative_tokens,
        params.num_speculative_tokens is None
        or _whole(params.num_speculative_tokens, 0, max_speculative_tokens),
        f"a whole number from 0 (off) to {max_speculative_tokens}",
    )
    _range(
        "stop",
        params.stop,
        len(params.stop) <= MAX_STOP_STRINGS and all(isinstance(stop, str) and stop for stop in params.stop),
        f"up to {MAX_STOP_STRINGS} strings, none of them empty",
    )


def _range(field: str, value: object, right: bool, wanted: str) -> None:
    if not right:
        raise InvalidRequest(f"{field}: {value!r} is not {wanted}", field=field)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any, least: int, most: int | None) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and value >= least and (most is None or value <= most)
