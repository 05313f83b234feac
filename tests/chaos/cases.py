"""Every case of the table, with its usual number of rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tests.chaos import bad_receivers, engine, hostile, largest, outages, poison
from tests.chaos.row import Row

Case = Callable[[int, int], Row | None]

CASES: Final[dict[str, tuple[Case, int]]] = {
    "one-stream-raises": (poison.one_stream_raises, 1),
    "sidecar-killed": (outages.sidecar_is_killed, 10),
    "backend-killed": (outages.database_process_is_killed, 5),
    "postmaster-killed": (outages.postmaster_is_killed, 5),
    "engine-killed": (engine.engine_is_killed, 3),
    "database-frozen": (outages.database_is_frozen, 1),
    "database-black-holed": (outages.database_is_black_holed, 1),
    "packets-dropped": (outages.packets_are_dropped, 1),
    "database-refuses": (outages.database_refuses, 1),
    "stopped-in-black-hole": (outages.stopped_in_a_black_hole, 1),
    "disk-full": (outages.disk_is_full, 2),
    "receivers-misbehave": (bad_receivers.receivers_misbehave, 1),
    "slow-requests": (hostile.slow_requests, 1),
    "unfinished-requests": (hostile.unfinished_requests, 1),
    "huge-body-without-key": (hostile.huge_body_without_a_key, 1),
    "huge-body-with-key": (hostile.huge_body_with_a_key, 1),
    "unread-exports": (hostile.unread_exports, 1),
    "otlp-bombs": (hostile.otlp_bombs, 1),
    "largest-bodies": (largest.largest_bodies, 1),
    "foreign-writes": (hostile.foreign_writes, 1),
}
