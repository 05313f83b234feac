"""The session of a canary probe's record: which prompt it replayed, and a digest of the answer.

A session is an opaque id of a conversation, and a greedy conversation is identified by its prompt and its
answer. So a probe can be sent as an ordinary AcceptanceRecord, and be paired with its earlier replays.
"""

from __future__ import annotations

import hashlib
from typing import Final

PREFIX: Final = "driftguard-probe:"
_DIGITS: Final = 16


def digest(data: bytes) -> str:
    """64 bits of SHA-256: enough to distinguish the prompts of one server, and their answers."""
    return hashlib.sha256(data).hexdigest()[:_DIGITS]


def session_of(prompt: str, answer: str) -> str:
    """The session made of two digests."""
    return f"{PREFIX}{prompt}:{answer}"


def parse(session: str) -> tuple[str, str]:
    """(prompt, answer) of a probe's session; the answer is empty if the sender gives none."""
    prompt, _, answer = session.removeprefix(PREFIX).partition(":")
    return prompt, answer
