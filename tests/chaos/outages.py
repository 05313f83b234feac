"""Processes that are killed, a database that goes silent, a disk that is full."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

from tests.chaos.dropped import Namespace, namespace
from tests.chaos.row import Row
from tests.chaos.scene import SERVERS, Scene, closing, postmaster, scene
from tests.chaos.sidecar import wait_for

PAUSE: Final = 0.25  # of a sender between two batches, so that the failure comes during traffic
SILENCE_SECONDS: Final = 20.0
DISK_BYTES: Final = 256_000_000
REFUSED_WITHIN_SECONDS: Final = 30.0
SENT_WITHIN_SECONDS: Final = 240.0


def sidecar_is_killed(seed: int, rounds: int) -> Row:
    row = Row("the sidecar is killed", f"{rounds} x SIGKILL at any moment")
    with scene(seed) as here:
        here.send(pause_seconds=PAUSE)
        for _ in range(rounds):
            time.sleep(here.random.uniform(0.1, 2.0))
            here.sidecar.kill()
            here.sidecar.start()
            row.recoveries.append(here.recovered())
        return closing(here, row, SERVERS, SENT_WITHIN_SECONDS)


def database_process_is_killed(seed: int, rounds: int) -> Row:
    """PostgreSQL then ends every session, and recovers by itself."""
    row = Row("a backend is killed", f"{rounds} x SIGKILL of a process of PostgreSQL")
    with scene(seed) as here:
        here.send(pause_seconds=PAUSE)
        for _ in range(rounds):
            time.sleep(here.random.uniform(0.5, 2.0))
            backends = postmaster(here.directory / "database" / "postgres").children()
            here.random.choice(backends).kill()
            row.recoveries.append(here.recovered())
        return closing(here, row, SERVERS, SENT_WITHIN_SECONDS)


def postmaster_is_killed(seed: int, rounds: int) -> Row:
    """The embedded one: nobody but the sidecar can start it again."""
    row = Row("the embedded database is killed", f"{rounds} x SIGKILL of the postmaster")
    with scene(seed, own_database=True) as here:
        here.send(pause_seconds=PAUSE)
        for _ in range(rounds):
            time.sleep(here.random.uniform(0.5, 2.0))
            killed = postmaster(here.sidecar.settings.data_directory / "postgres")
            killed.kill()
            with suppress(psutil.NoSuchProcess):
                killed.wait(10)
            row.recoveries.append(here.recovered())
        return closing(here, row, SERVERS, SENT_WITHIN_SECONDS)


def database_is_frozen(seed: int, rounds: int) -> Row:
    """Every process of it is stopped, so connections stay and nothing answers."""

    def freeze(here: Scene) -> Callable[[], None]:
        server = postmaster(here.directory / "database" / "postgres")
        stopped = [server, *server.children(recursive=True)]
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.suspend()

        def thaw() -> None:
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.resume()

        return thaw

    return _silence(seed, rounds, "the database is frozen", freeze)


def database_is_black_holed(seed: int, rounds: int) -> Row:
    """Connections stay open, and what is sent into them is lost."""
    return _silence(seed, rounds, "the database is black-holed", lambda here: _switch(here, "swallowing"))


def database_refuses(seed: int, rounds: int) -> Row:
    return _silence(seed, rounds, "the database refuses", lambda here: _switch(here, "refusing"))


def _switch(here: Scene, state: str) -> Callable[[], None]:
    assert here.relay is not None
    relay = here.relay
    relay.state = state  # type: ignore[assignment]

    def back() -> None:
        relay.state = "forwarding"

    return back


def packets_are_dropped(seed: int, rounds: int) -> Row | None:
    """Between two network namespaces, as a failed link does. None where no namespace can be made."""
    with namespace() as inside:
        if inside is None:
            return None

        def drop(_: Scene) -> Callable[[], None]:
            inside.drop()
            return inside.restore

        return _silence(seed, rounds, "packets to the database are dropped", drop, inside)


def _silence(
    seed: int,
    rounds: int,
    case: str,
    begin: Callable[[Scene], Callable[[], None]],
    inside: Namespace | None = None,
) -> Row:
    """/readyz answers 503 during the outage, and the sidecar recovers by itself."""
    row = Row(case, f"{rounds} x {SILENCE_SECONDS:.0f} s")
    with scene(seed, inside=inside) as here:
        here.send(pause_seconds=PAUSE)
        for _ in range(rounds):
            time.sleep(here.random.uniform(0.5, 2.0))
            end = begin(here)
            try:
                wait_for(lambda: not here.sidecar.is_ready(), SILENCE_SECONDS + 20, "/readyz to tell")
            except AssertionError as error:
                row.wrong.append(str(error))
            time.sleep(SILENCE_SECONDS)
            end()
            row.recoveries.append(here.recovered())
        return closing(here, row, SERVERS, SENT_WITHIN_SECONDS)


def stopped_in_a_black_hole(seed: int, rounds: int) -> Row:
    """SIGTERM while the database answers nothing: stopping must not wait for it."""
    row = Row("SIGTERM in a black hole", f"{rounds} x, recovery is the time to end")
    with scene(seed) as here:
        here.send(pause_seconds=PAUSE)
        for _ in range(rounds):
            time.sleep(here.random.uniform(0.5, 2.0))
            end = _switch(here, "swallowing")
            time.sleep(2.0)
            try:
                row.recoveries.append(here.sidecar.terminate())
            except subprocess.TimeoutExpired:
                row.wrong.append("it did not end within a minute")
                here.sidecar.kill()
            end()
            here.sidecar.start()
        return closing(here, row, SERVERS, SENT_WITHIN_SECONDS)


def disk_is_full(seed: int, rounds: int) -> Row | None:
    """The embedded database on a small file system. None where no file system can be mounted."""
    row = Row("the disk is full", f"{rounds} x full, then freed")
    with small_disk() as disk:
        if disk is None:
            return None
        with scene(seed, own_database=True, data_dir=disk / "data") as here:
            here.send(pause_seconds=PAUSE)
            trickle = [here.traffic.draw("trickle", 20) for _ in range(100 * rounds)]
            here.senders.start(trickle, PAUSE)
            for _ in range(rounds):
                filler = disk / "filler"
                _fill(filler)
                if not _is_refused(here):
                    row.wrong.append("nothing was refused, so the disk was never full")
                filler.unlink()
                row.recoveries.append(here.recovered())
            return closing(here, row, SERVERS, SENT_WITHIN_SECONDS)


def _is_refused(here: Scene) -> bool:
    refused = here.senders.refusals
    try:
        wait_for(lambda: here.senders.refusals > refused + 3, REFUSED_WITHIN_SECONDS, "a refusal")
    except AssertionError:
        return False
    return True


@contextmanager
def small_disk() -> Iterator[Path | None]:
    place = Path("/mnt") / f"driftguard-chaos-{os.getpid()}"
    mounted = False
    if os.geteuid() == 0:
        place.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
        mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    try:
        yield place if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(place)], check=False)
        with suppress(OSError):
            place.rmdir()


def _fill(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"\0" * 1_000_000)
