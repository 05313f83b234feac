"""What most cases need: a database behind a relay, a sidecar, senders, and a receiver of pages."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import psutil

from driftguard.store.database import Database, upgrade
from driftguard.store.embedded import start_embedded
from tests.alerting.http_receiver import Receiver, http_receiver
from tests.chaos import accounts
from tests.chaos.dropped import Namespace, relay_inside
from tests.chaos.relay import Relay, relay_to
from tests.chaos.row import RECOVERY_SECONDS, Row
from tests.chaos.sender import Senders
from tests.chaos.sidecar import ChaosSidecar, Watch, running, settings_of, wait_for, watching
from tests.chaos.traffic import FALLEN, UglyTraffic, in_batches

BATCH: Final = 50
BEFORE: Final = 1_000  # requests of a server before its fall
SINCE: Final = 300
SERVERS: Final = ("chat", "mail", "slow-clock")


@dataclass(frozen=True, slots=True)
class Scene:
    """`relay`: between the sidecar and its database; None where the sidecar has a database of its own."""

    directory: Path
    random: random.Random
    traffic: UglyTraffic
    sidecar: ChaosSidecar
    senders: Senders
    receiver: Receiver
    watch: Watch
    relay: Relay | None
    database: Database | None
    before: str = ""  # what `before_start` gave

    def send(self, servers: Sequence[str] = SERVERS, pause_seconds: float = 0.0) -> None:
        """One sender per server: its usual requests, then its fall."""
        for server in servers:
            records = self.traffic.draw(server, BEFORE) + self.traffic.draw(server, SINCE, FALLEN)
            self.senders.start(in_batches(records, BATCH), pause_seconds)

    def recovered(self) -> float:
        """Seconds until it is ready and a new record is acknowledged."""
        begun = time.monotonic()
        one = self.traffic.draw("pulse", 1)
        wait_for(self.sidecar.is_ready, 2 * RECOVERY_SECONDS, "the sidecar to be ready", self.sidecar.log)
        probe = Senders(self.sidecar.url)
        probe.start([one])
        assert probe.join(2 * RECOVERY_SECONDS), "nothing is acknowledged although it is ready"
        self.senders.acknowledged |= probe.acknowledged
        return time.monotonic() - begun

    def wait_told(self, servers: Sequence[str], seconds: float) -> tuple[int, int]:
        """(told, planted)."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            told = accounts.of_pages(self.receiver.taken()).told
            if set(servers) <= told:
                break
            time.sleep(0.2)
        told = accounts.of_pages(self.receiver.taken()).told
        return len(told & set(servers)), len(servers)


@contextmanager
def scene(
    seed: int,
    *,
    own_database: bool = False,
    inside: Namespace | None = None,
    data_dir: Path | None = None,
    before_start: Callable[[Database], str] | None = None,
    **more: Any,
) -> Iterator[Scene]:
    """`own_database`: the sidecar runs the embedded one. `inside`: where else the database is reached.
    `before_start` is called with the database before the sidecar starts. `more`: of ChaosSidecar, and
    `groups` of settings."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="driftguard-chaos-")))
        directory.chmod(0o755)
        receiver = stack.enter_context(http_receiver())
        relay = database = url = None
        if not own_database:
            url, relay, database = _database(stack, directory, inside)
        groups = more.pop("groups", {})
        alerting = groups.setdefault("alerting", {})
        alerting["webhook_urls"] = [*alerting.get("webhook_urls", []), receiver.url]
        settings = settings_of(data_dir or directory / "data", url, **groups)
        before = before_start(database) if before_start and database else ""
        sidecar = stack.enter_context(running(ChaosSidecar(directory, settings, **more)))
        watch = stack.enter_context(watching(sidecar))
        traffic = UglyTraffic(seed)
        traffic.let_clock_be_slow("slow-clock")
        senders = Senders(sidecar.url)
        stack.callback(senders.stop)
        yield Scene(
            directory,
            random.Random(seed),
            traffic,
            sidecar,
            senders,
            receiver,
            watch,
            relay,
            database,
            before,
        )


def _database(
    stack: ExitStack, directory: Path, inside: Namespace | None
) -> tuple[str, Relay | None, Database]:
    url = stack.enter_context(start_embedded(directory / "database"))
    upgrade(url)
    (socket_dir,) = parse_qs(urlsplit(url).query)["host"]
    database = Database.open(url)
    stack.callback(database.close)
    target = Path(socket_dir) / ".s.PGSQL.5432"
    if inside is not None:
        place = stack.enter_context(relay_inside(inside, target, directory / "relay.log"))
        return f"postgresql://postgres@{place}/postgres", None, database
    relay = stack.enter_context(relay_to(target))
    return f"postgresql://postgres@127.0.0.1:{relay.port}/postgres", relay, database


def closing(here: Scene, row: Row, told: Sequence[str], seconds: float) -> Row:
    """Waits for the senders and the pages, stops the sidecar, and counts."""
    if not here.senders.join(seconds):
        row.wrong.append(f"senders still waited after {seconds:.0f} s")
    row.pages = here.wait_told(told, RECOVERY_SECONDS)
    if doubled := accounts.of_pages(here.receiver.taken()).doubled:
        row.wrong.append(f"{doubled} pages twice")
    row.watch = here.watch
    here.sidecar.terminate()
    try:
        row.accounts = counted(here)
    except Exception as error:  # noqa: BLE001 (the rest of the row is still worth telling)
        row.wrong.append(f"not counted: {type(error).__name__}: {error}"[:300])
    return row.judge()


def counted(here: Scene) -> accounts.Accounts:
    if here.database is not None:
        return accounts.of_records(here.database, here.senders.acknowledged, here.sidecar.settings)
    with start_embedded(here.sidecar.settings.data_directory) as url:
        database = Database.open(url)
        try:
            return accounts.of_records(database, here.senders.acknowledged, here.sidecar.settings)
        finally:
            database.close()


def postmaster(pgdata: Path) -> psutil.Process:
    """Raises OSError or psutil.NoSuchProcess while there is none."""
    return psutil.Process(int((pgdata / "postmaster.pid").read_text().split("\n", 1)[0]))
