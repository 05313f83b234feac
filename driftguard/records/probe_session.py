"""The session of a canary probe's record: which prompt it replayed, a digest of the answer, and whether it
was asked again at once, when the server had the prompt in its prefix cache.

A session is an opaque id of a conversation, and a greedy conversation is identified by its prompt and its
answer. So a probe can be sent as an ordinary AcceptanceRecord, and be paired with its earlier replays.
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

PREFIX: Final = "driftguard-probe:"
_DIGITS: Final = 16
_WARM: Final = "+"  # behind the prompt's digest


def digest(data: bytes) -> str:
    """64 bits of SHA-256: enough to distinguish the prompts of one server, and their answers."""
    return hashlib.sha256(data).hexdigest()[:_DIGITS]


class Probe(NamedTuple):
    prompt: str
    answer: str
    is_warm: bool


def session_of(prompt: str, answer: str, *, is_warm: bool = False) -> str:
    """The session made of two digests."""
    return f"{PREFIX}{prompt}{_WARM if is_warm else ''}:{answer}"


def parse(session: str) -> Probe:
    """Of a probe's session; the answer is empty if the sender gives none."""
    prompt, _, answer = session.removeprefix(PREFIX).partition(":")
    return Probe(prompt.removesuffix(_WARM), answer, prompt.endswith(_WARM))
