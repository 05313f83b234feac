"""Posts an order to retraining.promote_webhook until it is accepted or refused, or the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import httpx
from pydantic import SecretStr
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_before_delay,
    wait_random_exponential,
)

from driftguard.masking import address, storable
from driftguard.outgoing.posting import NotAnswered
from driftguard.outgoing.posting import post as post_to
from driftguard.retraining.engines.order import Order, PromotionStopped, Reply

_ANSWER_SECONDS: Final = 30.0  # of one attempt
_ANSWER_CHARACTERS: Final = 2_000
_POLL_SECONDS: Final = 0.1
_LATER: Final = frozenset({httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_EARLY, httpx.codes.TOO_MANY_REQUESTS})
_backoff = wait_random_exponential(multiplier=0.2, max=30.0)


class _TryAgainError(Exception):
    """{why it was not accepted this time}"""


def post(
    url: str, key: SecretStr | None, order: Order, timeout_seconds: float, should_stop: Callable[[], bool]
) -> Reply:
    """Posts the order. Any 2xx accepts it. Without a readable answer, and after 408, 425, 429 and 5xx, it is
    posted again; any other status refuses it.

    Every attempt has the same Idempotency-Key. Raises PromotionStopped.
    """
    headers = {"Idempotency-Key": order.idempotency_key}
    if key is not None:
        headers["Authorization"] = f"Bearer {key.get_secret_value()}"

    def stops(state: RetryCallState) -> bool:
        return should_stop() or stop_before_delay(timeout_seconds)(state)

    def sleep(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not should_stop():
            time.sleep(min(_POLL_SECONDS, seconds))

    retrying = Retrying(
        retry=retry_if_exception_type(_TryAgainError),
        wait=_backoff,
        stop=stops,
        sleep=sleep,
        reraise=True,
    )
    shown = address(url)
    try:
        return retrying(_attempt, url, order, headers, min(_ANSWER_SECONDS, timeout_seconds))
    except _TryAgainError as error:
        if should_stop():
            raise PromotionStopped(f"stopped on request before {shown} accepted the promotion") from None
        return Reply(
            "", f"retraining.promote_webhook: {shown} did not accept within {timeout_seconds:g} s: {error}"
        )


def _attempt(url: str, order: Order, headers: Mapping[str, str], deadline_seconds: float) -> Reply:
    try:
        answer = post_to(url, order.members, headers, deadline_seconds=deadline_seconds)
    except NotAnswered as error:
        raise _TryAgainError(str(error)) from None
    text = storable(answer.text[:_ANSWER_CHARACTERS])
    if answer.is_success:
        if answer.problem is not None and not text:
            raise _TryAgainError(f"HTTP {answer.status}, but {answer.problem}")
        return Reply(text)
    told = f"HTTP {answer.status}: {' '.join(text.split())[:300]}"
    if answer.status >= httpx.codes.INTERNAL_SERVER_ERROR or answer.status in _LATER:
        raise _TryAgainError(told)
    return Reply(text, f"retraining.promote_webhook: {address(url)} refused with {told}")
