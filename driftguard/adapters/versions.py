"""Where each serving engine tells its version, and the version in its answer."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from driftguard.records import UNREADABLE_JSON

# Paths to ask, the newest name first, and the member of the JSON object that is answered.
_TOLD: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "vllm": (("/version",), "version"),
    "bentoml": (("/version",), "version"),
    "sglang": (("/server_info", "/get_server_info"), "version"),
    "tensorrt_llm": (("/version",), "version"),
    "tgi": (("/info",), "version"),
    "llamacpp": (("/props",), "build_info"),
}
_MOST_CHARACTERS: Final = 128


def paths(kind: str) -> tuple[str, ...]:
    """Of the adapter's kind; none where the engine does not tell."""
    return _TOLD[kind][0] if kind in _TOLD else ()


def version_in(kind: str, answer: str) -> str | None:
    """None: there is no version in it."""
    try:
        told: Any = msgspec.json.decode(answer)
    except UNREADABLE_JSON:
        return None
    found = told.get(_TOLD[kind][1]) if isinstance(told, dict) else None
    return found[:_MOST_CHARACTERS] if isinstance(found, str) and found else None
