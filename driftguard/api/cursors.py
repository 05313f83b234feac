"""Keyset cursors: the sort key of a page's last row, opaque to the caller."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any, TypeVar

import msgspec

from driftguard.errors import BadInput

Key = TypeVar("Key", bound=tuple[Any, ...])


def encode_cursor(key: tuple[Any, ...]) -> str:
    return urlsafe_b64encode(msgspec.json.encode(key)).decode().rstrip("=")


def decode_cursor(text: str, key: type[Key]) -> Key:
    """The sort key of the last row of the previous page. Raises BadInput: not a cursor of this list."""
    try:
        found: Key = msgspec.json.decode(urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=key)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        raise BadInput(
            "cursor: not a cursor of this list; use next_cursor of the previous page", field="cursor"
        ) from None
    return found
