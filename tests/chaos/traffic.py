"""Realistic traffic: many rare segments, conversations, and a source whose clock is slow.

Equally busy segments hide defects: here most segments have a single request on one side of a change.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

import numpy as np

from driftguard.records import AcceptanceRecord

K: Final = 4
TURNS: Final = 5  # of a conversation, which are no independent requests
SLOW_CLOCK: Final = timedelta(minutes=40)
RATE: Final = 0.75
FALLEN: Final = 0.40
_SECONDS_PER_STEP: Final = 0.05


class UglyTraffic:
    """Draws records of servers whose segments have Zipf shares. The same seed draws the same requests."""

    def __init__(self, seed: int, segments: int = 8) -> None:
        self._random = np.random.default_rng(seed)
        shares = 1.0 / np.arange(1, segments + 1) ** 1.6
        self._shares = shares / shares.sum()
        self._segments = [f"segment-{number:02d}" for number in range(segments)]
        self._sessions: dict[str, tuple[str, float, int]] = {}
        self._late: set[str] = set()

    def let_clock_be_slow(self, server: str) -> None:
        self._late.add(server)

    def draw(self, server: str, count: int, rate: float = RATE) -> list[AcceptanceRecord]:
        """The next requests of a server, which end now; a third of them are turns of conversations."""
        until = datetime.now(UTC) - (SLOW_CLOCK if server in self._late else timedelta())
        chosen = self._random.choice(len(self._segments), size=count, p=self._shares)
        return [
            self._one(server, self._segments[place], rate, until - timedelta(milliseconds=count - ordinal))
            for ordinal, place in enumerate(chosen)
        ]

    def _one(self, server: str, segment: str, rate: float, ended_at: datetime) -> AcceptanceRecord:
        session, latent = self._session(server, rate)
        steps = int(self._random.integers(5, 40))
        accepted = int(self._random.binomial(steps * K, latent))
        emitted = accepted + steps
        return AcceptanceRecord(
            record_id=UUID(bytes=self._random.bytes(16)),
            kind="request",
            started_at=ended_at - timedelta(seconds=float(self._random.uniform(0.2, 30.0))),
            ended_at=ended_at,
            server=server,
            target="target",
            draft="draft",
            draft_version="v1",
            method="draft_model",
            segment=segment,
            session=session,
            steps=steps,
            drafted=steps * K,
            accepted=accepted,
            emitted=emitted,
            fidelity="request",
            num_speculative_tokens=K,
            output_tokens=emitted,
            time_per_output_token_seconds=_SECONDS_PER_STEP
            * steps
            / emitted
            * float(self._random.uniform(0.9, 1.1)),
        )

    def _session(self, server: str, rate: float) -> tuple[str | None, float]:
        """(its name, its acceptance): turns of one conversation are alike."""
        if self._random.random() > 1 / 3:
            return None, self._latent(rate)
        name, latent, left = self._sessions.get(server, ("", 0.0, 0))
        if not left:
            name, latent, left = (
                f"session-{self._random.integers(2**40)}",
                float(self._random.normal()),
                TURNS,
            )
        self._sessions[server] = (name, latent, left - 1)
        return name, float(np.clip(rate + 0.08 * latent, 0.02, 0.98))

    def _latent(self, rate: float) -> float:
        return float(np.clip(self._random.normal(rate, 0.1), 0.02, 0.98))


def in_batches(records: Sequence[AcceptanceRecord], size: int) -> list[list[AcceptanceRecord]]:
    return [list(records[start : start + size]) for start in range(0, len(records), size)]
