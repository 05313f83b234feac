"""What a sidecar answers to an OTLP export, in either encoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
from google.protobuf.json_format import Parse

PROTOBUF, JSON = "application/x-protobuf", "application/json"


def answered(answer: httpx.Response, media_type: str, kind: Callable[[], Any]) -> Any:
    """`kind`: the message that an answer is; that it is one, and no error, is checked."""
    assert (answer.status_code, answer.headers["content-type"]) == (200, media_type), answer.text
    message = kind()
    if media_type == JSON:
        Parse(answer.content, message)
    else:
        message.ParseFromString(answer.content)
    return message
