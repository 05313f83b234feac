"""The segment and the session of a request, from its headers in vLLM's API server to its engine.

The two are processes of their own. What a request asks of the sampler travels from one to the other, and has
room for values of plugins (`SamplingParams.extra_args`): there the labels go.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any, Final

SEGMENT_HEADER: Final = b"x-driftguard-segment"
SESSION_HEADER: Final = b"x-driftguard-session"
EXTRA_ARGUMENT: Final = "driftguard"
MAX_LENGTH: Final = 256

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_current: ContextVar[Mapping[str, str]] = ContextVar("driftguard_labels")


class RequestLabels:
    """ASGI middleware: `vllm serve --middleware driftguard_vllm.RequestLabels`."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _current.set(_labels(scope["headers"]))
        await self._app(scope, receive, send)


def _labels(headers: list[tuple[bytes, bytes]]) -> Mapping[str, str]:
    """Of ASGI headers, which are in lower case; read as UTF-8. What no record can hold is left out."""
    found = {}
    for name, key in ((SEGMENT_HEADER, "segment"), (SESSION_HEADER, "session")):
        text = next((value.decode(errors="replace") for header, value in headers if header == name), "")
        if "\ufffd" in text:
            continue
        if 1 <= len(text) <= MAX_LENGTH and text.isprintable():
            found[key] = text
    return found


def put_into(sampling_params: Any) -> None:
    """The labels of the current request, where it has any."""
    if labels := _current.get({}):
        sampling_params.extra_args = {**(sampling_params.extra_args or {}), EXTRA_ARGUMENT: dict(labels)}


def of(sampling_params: Any) -> Mapping[str, str]:
    """What `put_into` put there."""
    labels = (getattr(sampling_params, "extra_args", None) or {}).get(EXTRA_ARGUMENT)
    return labels if isinstance(labels, dict) else {}
