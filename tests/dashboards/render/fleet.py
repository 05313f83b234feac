"""Another scene: a sidecar with as many servers as are asked for, or with none, all of drawn requests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final
from uuid import UUID

import httpx
import numpy as np
from msgspec.structs import replace

from driftguard.demo.processes import free_url, start_sidecar
from driftguard.demo.run import START_SECONDS
from driftguard.records import AcceptanceRecord
from tests.cost.traffic import Server
from tests.dashboards.render.scene import FALLEN, KNOWN, SEED, Recording, record_of
from tests.integration.servers import running_prometheus
from tests.pipeline.sidecar import post

SECONDS: Final = 420.0
FALL_AFTER_SECONDS: Final = 270.0  # by then a segment is watched
PAUSE_SECONDS: Final = 1.0
REQUESTS: Final = 2  # of each server between two pauses
FALLING: Final = 50  # one of so many servers falls


def record_fleet(directory: Path, servers: int) -> Recording:
    """It takes SECONDS, also without servers: then there is only what a sidecar tells of itself."""
    print(f"seed {SEED}")
    random = np.random.default_rng(SEED)
    known, fallen = (_requests(random, server) for server in (KNOWN, FALLEN))
    url = free_url()
    with ExitStack() as stack:
        sidecar = start_sidecar(directory, url, f'data_dir = "{directory / "data"}"\n')
        stack.callback(sidecar.stop)
        sidecar.wait_ready(f"{url}/readyz", START_SECONDS)
        prometheus = directory / "prometheus"
        prometheus.mkdir()
        intervals = {"scrape_interval": "5s", "evaluation_interval": "5s"}
        stack.enter_context(running_prometheus(prometheus, [url], intervals=intervals))
        client = stack.enter_context(httpx.Client(base_url=url, timeout=60.0))
        start = time.time()
        while (now := time.time()) < start + SECONDS:
            has_fallen = now > start + FALL_AFTER_SECONDS
            sent = [
                record
                for number in range(servers)
                for record in _sent(
                    random, fallen if has_fallen and number % FALLING == 0 else known, f"chat-{number:03}"
                )
            ]
            if sent:
                post(client, sent)
            time.sleep(max(0.0, now + PAUSE_SECONDS - time.time()))
        return Recording(start, now)  # behind it, a scrape may meet a sidecar that stops


def _requests(random: np.random.Generator, server: Server) -> list[AcceptanceRecord]:
    """Some without speculation, so that its cost is known."""
    now = datetime.now(UTC)
    return [
        record_of(drawn, k, UUID(int=0), "", now, now)
        for k in [4] * 19 + [0]
        for drawn in server.serve(random, 20, k)
    ]


def _sent(
    random: np.random.Generator, requests: Sequence[AcceptanceRecord], server: str
) -> Iterator[AcceptanceRecord]:
    for place in random.integers(0, len(requests), REQUESTS):
        ended_at = datetime.now(UTC)
        yield replace(
            requests[place],
            record_id=UUID(bytes=random.bytes(16)),
            server=server,
            started_at=ended_at - timedelta(seconds=2),
            ended_at=ended_at,
        )
