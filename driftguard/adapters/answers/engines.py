"""Detects the engine, and names the field with which a request to its OpenAI API asks for counts.

vLLM's and TensorRT-LLM's counts are switched on when the server is started, llama.cpp's are always present.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from driftguard.adapters.answers import sglang
from driftguard.adapters.answers.counts import AnswerUnreadable, decoded

Engine = Literal["unknown", "vllm", "sglang", "llamacpp", "driftguard", "other"]

ASKED_FIELDS: Final[Mapping[Engine, str]] = {"sglang": sglang.REQUEST_FIELD}  # with the value true
_OWNERS: Final[Mapping[str, Engine]] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llamacpp",
    "driftguard": "driftguard",
}


class _Model(msgspec.Struct, frozen=True):
    owned_by: str | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


def owner_of(models: bytes) -> str | None:
    """`owned_by` of the first model in an answer of /v1/models; None if it is missing."""
    try:
        found = decoded(models, _Models).data
    except AnswerUnreadable:
        return None
    return found[0].owned_by if found else None


def engine_owning(owner: str | None) -> Engine:
    """The engine that this `owned_by` stands for; "other" if it is unknown."""
    return _OWNERS.get(owner or "", "other")
