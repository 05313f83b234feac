"""Through a real PgBouncer: what pools sessions is as good as PostgreSQL itself, anything else is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg
import pytest
from sqlalchemy import make_url

from driftguard.app.doctor import database as doctor
from driftguard.demo.processes import free_port
from driftguard.errors import BadSettings, DatabaseUnavailable
from driftguard.settings import Settings
from driftguard.store.database import Database
from driftguard.store.open_database import open_database, upgrade_database
from driftguard.store.scrape_leases import LeaseLocks
from tests.alerting.http_receiver import wait_until
from tests.store.black_hole import black_hole

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

pytestmark = pytest.mark.skipif(PGBOUNCER is None, reason="PgBouncer is not installed")

Pooled = Callable[..., str]


@pytest.fixture
def pooled(empty_database_url: str) -> Iterator[Pooled]:
    """Starts a PgBouncer with these settings in front of the database, and gives the URL through it."""
    with ExitStack() as stack:

        def start(**settings: object) -> str:
            server = make_url(stack.enter_context(black_hole(empty_database_url)).url)
            directory = Path(stack.enter_context(TemporaryDirectory(prefix="driftguard-test-")))
            port = free_port()
            stack.enter_context(_pgbouncer(directory, server.port, server.username, port, settings))
            url = server.set(port=port)
            wait_until(
                lambda: _answers(url.set(drivername="postgresql").render_as_string(False)), "PgBouncer"
            )
            return url.render_as_string(hide_password=False)

        yield start


def _pgbouncer(
    directory: Path, server_port: int | None, user: str | None, port: int, settings: dict[str, object]
) -> ExitStack:
    (directory / "users.txt").write_text(f'"{user}" ""\n')
    given = {
        "listen_addr": "127.0.0.1",
        "listen_port": port,
        "unix_socket_dir": "",
        "auth_type": "trust",
        "auth_file": directory / "users.txt",
        **settings,
    }
    lines = "\n".join(f"{name} = {value}" for name, value in given.items())
    (directory / "pgbouncer.ini").write_text(
        f"[databases]\n* = host=127.0.0.1 port={server_port}\n[pgbouncer]\n{lines}\n"
    )
    directory.chmod(0o755)  # it refuses to be root, and reads the files as another
    as_other = ["-u", "nobody"] if os.geteuid() == 0 else []
    assert PGBOUNCER is not None
    process = subprocess.Popen([PGBOUNCER, "-q", *as_other, str(directory / "pgbouncer.ini")])
    stack = ExitStack()
    stack.callback(process.wait)
    stack.callback(process.kill)
    return stack


def _answers(url: str) -> bool:
    try:
        with psycopg.connect(url, connect_timeout=2) as connection:
            return connection.execute("SELECT true").fetchone() == (True,)
    except psycopg.OperationalError as error:
        return "statement pooling" in str(error)


@pytest.mark.parametrize("in_turn", [0, 1])
def test_pooled_transactions_are_refused_before_anything_is_changed(pooled: Pooled, in_turn: int) -> None:
    url = pooled(pool_mode="transaction", server_round_robin=in_turn)
    connections = [psycopg.connect(url.replace("+psycopg", "")) for _ in range(3)]
    for connection in connections:  # sessions that others have left in the pool
        connection.execute("SELECT 1")
    for connection in connections:
        connection.commit()
    settings = Settings(database_url=url)
    for attempt in (lambda: upgrade_database(settings), lambda: open_database(settings).__enter__()):
        with pytest.raises(BadSettings, match=r"pools transactions.*pool_mode = session"):
            attempt()
    assert connections[0].execute(
        "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"
    ).fetchone() == (0,)
    assert connections[0].execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone() == (
        0,
    )
    for connection in connections:
        connection.close()
    checks = {finding.check: finding for finding in doctor.database(settings)}
    assert checks["database"].state == "ok"
    assert "pool_mode = session" in checks["database sessions"].fix


def test_pooled_statements_are_refused(pooled: Pooled) -> None:
    with pytest.raises(DatabaseUnavailable, match="statement pooling mode"):
        upgrade_database(Settings(database_url=pooled(pool_mode="statement")))


def test_through_pooled_sessions_a_lock_is_one_sidecars_and_ends_with_it(pooled: Pooled) -> None:
    settings = Settings(database_url=pooled(pool_mode="session"))
    upgrade_database(settings)
    with open_database(settings) as one, open_database(settings) as other:
        first, second = LeaseLocks(one), LeaseLocks(other)
        assert first.take(["chat"]) == {"chat"}
        assert second.take(["chat"]) == frozenset()
        first.check()
        first._connection.close()  # as with a process that is killed
        wait_until(lambda: second.take(["chat"]) == {"chat"}, "the lock of the one that is gone")
        second.close()


def test_the_database_itself_is_no_pooler(empty_database_url: str) -> None:
    database = Database.open(empty_database_url)
    database.check_sessions()
    database.close()
