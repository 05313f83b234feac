"""Keyset cursors: the sort key of a page's last row, opaque to the caller."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from datetime import UTC, datetime

from driftguard.errors import BadInput


def encode_cursor(at: datetime, row_id: object) -> str:
    return urlsafe_b64encode(f"{at.isoformat()}|{row_id}".encode()).decode().rstrip("=")


def decode_cursor(text: str) -> tuple[datetime, str]:
    """(time, id) of the last row of the page before. Raises BadInput."""
    try:
        decoded = urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
        at, _, row_id = decoded.partition("|")
        return datetime.fromisoformat(at).astimezone(UTC), row_id
    except ValueError:
        raise bad_cursor() from None


def bad_cursor() -> BadInput:
    return BadInput("cursor: not a cursor of this API; take next_cursor of the page before", field="cursor")
