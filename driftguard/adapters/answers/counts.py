"""The counts of one request, as its answer gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from driftguard.records import UNREADABLE_JSON

Answer = TypeVar("Answer")


class AnswerUnreadable(ValueError):
    """The answer is not JSON, or its counts do not have the format that its engine documents."""


class SettingNeeded(ValueError):
    """The answer's counts need a setting; the message names it."""


class AnswerCounts(msgspec.Struct, frozen=True):
    """Counts of one request; None if the engine does not give them.

    emitted: the tokens that the steps emitted. The first token of an answer is not included if it comes
    from reading the prompt.
    """

    steps: int
    drafted: int
    accepted: int
    emitted: int
    num_speculative_tokens: int | None = None
    accepted_per_position: list[int] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    time_to_first_token_seconds: float | None = None
    time_per_output_token_seconds: float | None = None


def decoded(answer: bytes, kind: type[Answer]) -> Answer:
    """Raises AnswerUnreadable."""
    try:
        return msgspec.json.decode(answer, type=kind)
    except UNREADABLE_JSON as error:
        raise AnswerUnreadable(str(error)) from None


def emitted(steps: int, accepted: int, output_tokens: int | None) -> int:
    """An answer that ends inside an accepted run has fewer tokens than its steps emitted."""
    return accepted + steps if output_tokens is None else min(accepted + steps, output_tokens)


def per_position(histogram: Sequence[int] | None) -> list[int] | None:
    """histogram[j] steps accepted exactly j tokens, so position i was accepted in sum_{j > i} of them."""
    if not histogram:
        return None
    return [sum(histogram[place + 1 :]) for place in range(len(histogram) - 1)]


def seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1_000
