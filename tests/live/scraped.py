"""A real server as a source of the sidecar."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.alerting.http_receiver import wait_until
from tests.live import clients
from tests.live.processes import Sidecar, of_all, sidecar
from tests.live.servers import Engine, running

STALE_SECONDS = 420.0  # five minutes of silence, and the time to notice


def scraping(url: str, draft_version: str = "v1") -> str:
    """The sidecar's settings, without canary probes, whose windows are left out."""
    return f"""
[[sources]]
url = "{url}/metrics"
server = "real"
draft = "small"
draft_version = "{draft_version}"
method = "draft_model"
[scraping]
interval_seconds = 1.0
[probes]
enabled = false
"""


def condition(beside: Sidecar) -> str:
    sources = beside.get("status")["sources"]
    return str(sources[0]["condition"]) if sources else ""


def is_scraped(beside: Sidecar) -> bool:
    """Is the server known, with nothing served yet?"""
    return condition(beside) in ("waiting", "idle")


def windows_are(beside: Sidecar, own: Mapping[str, int]) -> bool:
    """Do the windows add up to these of the server's own counts?"""
    ours = of_all(beside.records())
    return all(ours[name] == count for name, count in own.items())


def assert_a_kill_loses_nothing(
    engine: Engine,
    own_counts: Callable[[Engine], dict[str, int]],
    asks: Sequence[clients.Ask],
    directory: Path,
    database_url: str,
) -> None:
    """Windows add up to the server's own counts before it is killed, and to those of both its lives after."""
    before = own_counts(engine)
    with sidecar(directory, database_url, scraping(engine.url)) as beside:
        wait_until(lambda: is_scraped(beside), "the first scrape")
        clients.all_of(asks, engine.url, 25, seed=4)
        first = {name: count - before[name] for name, count in own_counts(engine).items()}
        wait_until(lambda: windows_are(beside, first), f"windows of {first}")
        engine.stop(signal.SIGKILL)
        wait_until(lambda: condition(beside) == "unreachable", "the server's absence")
        engine.start()
        clients.all_of(asks, engine.url, 12, seed=5)
        both = {name: first[name] + count for name, count in own_counts(engine).items()}
        wait_until(lambda: windows_are(beside, both), f"windows of {both}")


def assert_it_may_stay_away(
    engine: Engine, asks: Sequence[clients.Ask], directory: Path, database_url: str
) -> None:
    """The source is unreachable at once, its stream stale after five minutes; not when it is back."""
    with sidecar(directory, database_url, scraping(engine.url)) as beside:

        def verdict() -> str:
            streams = beside.get("status")["streams"]
            return str(streams[0]["verdict"]) if streams else ""

        wait_until(lambda: is_scraped(beside), "the first scrape")
        clients.all_of(asks, engine.url, 25, seed=6)
        wait_until(lambda: verdict() != "", "the stream")
        engine.stop(signal.SIGTERM)
        wait_until(lambda: condition(beside) == "unreachable", "the server's absence")
        assert verdict() != "stale"
        deadline = time.monotonic() + STALE_SECONDS
        while verdict() != "stale":
            assert time.monotonic() < deadline, f"{verdict()} after {STALE_SECONDS:.0f} s of silence"
            time.sleep(2)
        engine.start()
        clients.all_of(asks, engine.url, 25, seed=7)
        wait_until(lambda: verdict() not in ("", "stale"), "its return")
        wait_until(lambda: condition(beside) == "reporting", "the source's return")


def assert_windows_are_of_the_draft_of_each_life(
    engine: Engine,
    other: Sequence[str],
    own_counts: Callable[[Engine], dict[str, int]],
    directory: Path,
    database_url: str,
) -> None:
    """A draft is announced as v2 while v1 serves, and comes with the next start, which is by `other`."""
    asks = [clients.greedy_completion]
    with (
        running(engine),
        sidecar(directory / "sidecar", database_url, scraping(engine.url)) as beside,
    ):
        wait_until(lambda: is_scraped(beside), "the first scrape")
        clients.all_of(asks, engine.url, 12, seed=8)
        told = beside.client.post("/api/v1/drafts/announce", json={"server": "real", "draft_version": "v2"})
        assert told.status_code == 200, told.text
        clients.all_of(asks, engine.url, 12, seed=9)
        first = own_counts(engine)
        wait_until(lambda: windows_are(beside, first), f"windows of {first}")
        engine.stop()
        engine.command = other
        engine.start()
        clients.all_of(asks, engine.url, 24, seed=10)
        second = own_counts(engine)
        both = {name: count + second[name] for name, count in first.items()}
        wait_until(lambda: windows_are(beside, both), f"windows of {second} as well")
        records = beside.records()
    for version, own in (("v1", first), ("v2", second)):
        ours = of_all([record for record in records if record.draft_version == version])
        print(f"{version}: ours {ours}, its own {own}")
        assert {name: ours[name] for name in own} == own
