"""Servers whose counters are scraped take another K only by a restart: their counters begin at 0."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from uuid import UUID

import numpy as np
import pytest

from driftguard.records import AcceptanceRecord
from driftguard.store import incidents
from driftguard.store.database import Database
from tests.incidents.server import Server
from tests.pipeline.traffic import store

SECONDS, STEPS = 10, 2_000
RESTART = timedelta(minutes=1)


class ScrapedServer:
    """vLLM: it counts accepted tokens per position, and the steps, each of which drafts the first."""

    def __init__(self, database: Database, seed: int, *, tells_positions: bool = True) -> None:
        self.draft_version, self.target, self._tells_positions = "v1", "target", tells_positions
        self.sidecar = Server(database, seed)
        self._database, self._random = database, np.random.default_rng(seed)
        self.clock = datetime.now(UTC)

    def serve(self, windows: int, first: float, k: int) -> None:
        """Windows whose first draft token is accepted so often (sd .02 between them), and each next one as
        often again."""
        records = [self._window(first, k) for _ in range(windows)]
        store(self._database, records, arrived_at=self.clock)
        self.sidecar.now = self.clock
        self.sidecar.look()

    def restart(self) -> None:
        self.clock += RESTART

    def _window(self, first: float, k: int) -> AcceptanceRecord:
        rate = self._random.normal(first, 0.02)
        kept = [int(self._random.binomial(STEPS, rate ** (place + 1))) for place in range(k)]
        begun, self.clock = self.clock, self.clock + timedelta(seconds=SECONDS)
        return AcceptanceRecord(
            record_id=UUID(bytes=self._random.bytes(16)),
            kind="window",
            started_at=begun,
            ended_at=self.clock,
            server="chat",
            target=self.target,
            draft="draft",
            draft_version=self.draft_version,
            method="draft_model",
            steps=STEPS,
            drafted=k * STEPS,
            accepted=sum(kept),
            emitted=sum(kept) + STEPS,
            accepted_per_position=kept if self._tells_positions else None,
            num_speculative_tokens=k,
            fidelity="counter",
        )


def test_a_fall_of_windows_counts_windows_and_not_requests(database: Database) -> None:
    server = ScrapedServer(database, 730)
    server.serve(300, 0.75, 4)
    server.serve(30, 0.6, 4)
    with database.session() as session:
        opened = next(iter(incidents.transitions(session, server.sidecar.fall().id)))
    assert re.search(r"; found \d+ windows after the change$", opened.reason)


@pytest.mark.parametrize("k", [3, 6])
def test_a_fall_together_with_another_k_is_told_and_ends(database: Database, k: int) -> None:
    server = ScrapedServer(database, 700 + k)
    server.serve(300, 0.75, 4)
    server.restart()
    server.serve(60, 0.6, k)
    fall = server.sidecar.fall()
    assert fall.state == "open"
    assert (fall.acceptance_before, fall.acceptance_after) == pytest.approx((0.75, 0.6), abs=0.02)
    server.serve(200, 0.6, k)
    assert server.sidecar.fall().state == "open"
    server.serve(100, 0.75, k)
    server.sidecar.look()
    assert server.sidecar.fall().state == "resolved"


@pytest.mark.parametrize("seed", range(710, 712))
def test_another_k_alone_is_no_fall(database: Database, seed: int) -> None:
    server = ScrapedServer(database, seed)
    server.serve(300, 0.75, 4)
    server.restart()
    server.serve(300, 0.75, 2 + seed % 6)
    assert server.sidecar.falls() == []


def test_a_fall_that_is_open_goes_on_at_another_k(database: Database) -> None:
    server = ScrapedServer(database, 720)
    server.serve(300, 0.75, 4)
    server.serve(30, 0.6, 4)
    assert server.sidecar.fall().state == "open"
    server.restart()
    server.serve(1_200, 0.6, 6)
    assert server.sidecar.fall().state == "open"
    server.serve(200, 0.75, 6)
    server.sidecar.look()
    assert server.sidecar.fall().state == "resolved"
