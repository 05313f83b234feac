"""One stream that cannot be folded, among many that can."""

from __future__ import annotations

from typing import Final

import httpx

from tests.chaos.poisoned import POISONED
from tests.chaos.row import RECOVERY_SECONDS, Row
from tests.chaos.scene import Scene, closing, scene
from tests.chaos.sidecar import wait_for

HEALTHY: Final = 50
SET_ASIDE: Final = "cannot_be_judged"
SET_ASIDE_SECONDS: Final = 120.0


def one_stream_raises(seed: int, rounds: int, healthy: int = HEALTHY) -> Row:
    """The others' falls are paged, and it is set aside; without the defect its own fall is detected."""
    row = Row("one stream raises", f"in every fold of 1 of {healthy * rounds + 1} streams")
    names = [f"chat-{number:02d}" for number in range(healthy * rounds)]
    with scene(seed, module="tests.chaos.poisoned") as here:
        here.send([POISONED, *names])
        told, planted = here.wait_told(names, 300.0)
        if told != planted:
            row.wrong.append(f"{told} of {planted} falls were told beside the stream that raises")
        wait_for(lambda: _verdict(here) == SET_ASIDE, SET_ASIDE_SECONDS, "the stream to be set aside")
        here.sidecar.terminate()
        here.sidecar.module = "driftguard"
        here.sidecar.start()
        stream_id = _streams(here)[POISONED]["id"]
        httpx.post(f"{here.sidecar.url}/api/v1/streams/{stream_id}/retry").raise_for_status()
        row.recoveries.append(
            wait_for(lambda: _verdict(here) == "degraded", RECOVERY_SECONDS, "its own fall to be told")
        )
        return closing(here, row, [POISONED, *names], 120.0)


def _verdict(here: Scene) -> str:
    return str(_streams(here)[POISONED]["verdict"])


def _streams(here: Scene) -> dict[str, dict[str, str]]:
    answer = httpx.get(f"{here.sidecar.url}/api/v1/status", timeout=30.0)
    return {stream["server"]: stream for stream in answer.raise_for_status().json()["streams"]}
