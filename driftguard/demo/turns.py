"""Speeds of engines in several set-ups, measured in turns.

Each turn measures every set-up once, with requests drawn alike, and begins with another one: whatever else
the machine does meanwhile slows all of them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

import httpx

from driftguard.demo.processes import DemoFailed
from driftguard.demo.traffic import REQUEST_TIMEOUT_SECONDS, Load, Traffic

TURNS = 8
REQUESTS = 8  # of each set-up in each turn


@dataclass(frozen=True, slots=True)
class SetUp:
    """`url`: of an engine that has nothing else to do."""

    name: str
    url: str
    load: Load


def put_into_service(url: str, version: str, directory: str | None) -> None:
    """Raises DemoFailed, httpx.HTTPError."""
    answer = httpx.get(f"{url}/admin/info", timeout=REQUEST_TIMEOUT_SECONDS, trust_env=False)
    info = answer.raise_for_status().json()
    if info["draft"]["version"] == version:
        return
    if directory is None:
        raise DemoFailed(f"the directory of draft {version} is not known")
    for path, body in (
        ("/admin/drafts", {"directory": directory, "version": version}),
        (f"/admin/drafts/{quote(version, safe='')}/activate", {}),
    ):
        httpx.post(url + path, json=body, timeout=REQUEST_TIMEOUT_SECONDS, trust_env=False).raise_for_status()


def measure(
    traffic: Traffic,
    set_ups: Sequence[SetUp],
    on_turn: Callable[[int], None],
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, list[float]]:
    """Name of the set-up -> tokens per second of each turn, [TURNS]. One more turn comes before these, to
    warm up. `clock`: in seconds. Raises DemoFailed: a request failed, or none had
    tokens."""
    speeds: dict[str, list[float]] = {set_up.name: [] for set_up in set_ups}
    for turn in range(TURNS + 1):
        first = turn % len(set_ups)
        for set_up in [*set_ups[first:], *set_ups[:first]]:
            speed = asyncio.run(_tokens_per_second(traffic, set_up, turn, clock))
            if turn > 0:
                speeds[set_up.name].append(speed)
        on_turn(turn)
    return speeds


async def _tokens_per_second(traffic: Traffic, set_up: SetUp, turn: int, clock: Callable[[], float]) -> float:
    free = asyncio.Semaphore(traffic.concurrency)
    async with httpx.AsyncClient(
        base_url=set_up.url, timeout=REQUEST_TIMEOUT_SECONDS, trust_env=False
    ) as client:

        async def ask(number: int) -> int:
            choice = random.Random(f"{traffic.seed}:{turn}:{number}")
            async with free:
                answer = await traffic.ask(client, set_up.load, choice)
            if answer.error:
                raise DemoFailed(f"a request failed while speeds were compared: {answer.error}")
            return answer.output_tokens

        began_at = clock()
        tokens = sum(await asyncio.gather(*(ask(number) for number in range(REQUESTS))))
        seconds = clock() - began_at
    if not tokens:
        raise DemoFailed(f"no tokens came in turn {turn} of the speeds, {set_up.name!r}")
    return tokens / seconds
