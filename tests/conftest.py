"""A real PostgreSQL for every test that asks for one: the embedded server, and a fresh database per test.

Property tests draw the same examples in every run. A run may be limited in time (`--begin-until`): in which
order the files come is then drawn (`--shuffle`), so that in several runs all have their turn.
"""

from __future__ import annotations

import atexit
import gc
import os
import random
import shutil
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import certifi
import httpx
import psycopg
import pytest
import structlog
from hypothesis import settings

from driftguard.store.database import Database, parse_url, upgrade
from driftguard.store.embedded import start_embedded

settings.register_profile("same-examples", derandomize=True)
settings.load_profile("same-examples")

# The default prints every local variable of every frame, which takes seconds.
structlog.configure(
    processors=[
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)


MEMORY = Path("/dev/shm")  # a database, 400 small files, is copied there in a tenth of the time
MEMORY_NEEDED_BYTES = 4 * 2**30  # for all workers; containers often have less


LONGEST_ID = 200  # characters of a value that stand in the name of a test
NOT_BEGUN = "not begun: the time of this run was over"
PATIENCE_SECONDS = 60.0  # with a server of this machine, which may be busy with other tests


def pytest_configure() -> None:
    """httpx loads all certificate authorities for each client, which takes a tenth of a second: here it loads
    one; tests that use TLS name theirs. And its default timeout of 5 s is too short for a busy machine."""
    for phase in ("connect", "read", "write", "pool"):
        setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, phase, PATIENCE_SECONDS)
    end = "-----END CERTIFICATE-----\n"
    with tempfile.NamedTemporaryFile("w", suffix=".pem", delete=False) as file:
        file.write(certifi.contents().partition(end)[0] + end)
    os.environ["SSL_CERT_FILE"] = file.name
    atexit.register(Path(file.name).unlink, missing_ok=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--begin-until", type=float, metavar="UNIXTIME", help="skip what has not begun by then")
    parser.addoption("--shuffle", metavar="SEED", help="run the files in an order that is drawn by it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if seed := config.getoption("shuffle"):
        paths = sorted({item.path for item in items})
        random.Random(seed).shuffle(paths)
        places = {path: place for place, path in enumerate(paths)}
        items.sort(key=lambda item: places[item.path])


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Long values are not written out: one of six megabytes would be what a failure shows, and one that is
    compressed anew by each worker would be another test there, as it holds the time."""
    if isinstance(val, str | bytes) and len(val) > LONGEST_ID:
        return f"{argname} of {len(val)}"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    end = item.config.getoption("begin_until")
    if end is not None and time.time() > end:
        pytest.skip(NOT_BEGUN)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", ())
    if count := sum(NOT_BEGUN in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(f"{count} tests were {NOT_BEGUN}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What the tests import stays until the end: the garbage collector never has to look through it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of a server for this test run."""
    with server_directory() as directory, start_embedded(directory) as url:
        stop_syncing(url)
        yield url


@contextmanager
def server_directory() -> Iterator[Path]:
    """Not in pytest's own directory, whose permissions change; in memory where enough is free."""
    has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MEMORY_NEEDED_BYTES
    directory = Path(tempfile.mkdtemp(prefix="driftguard-test-", dir=MEMORY if has_room else None))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def template_database(postgres_server: str) -> str:
    return create_template(postgres_server)


@pytest.fixture
def database_url(postgres_server: str, template_database: str) -> Iterator[str]:
    """URL of a fresh database with the newest schema."""
    yield from fresh_database(postgres_server, template=template_database)


@pytest.fixture(scope="module")
def module_database_url(postgres_server: str, template_database: str) -> Iterator[str]:
    """Like database_url, one for a whole file: for tests that leave nothing behind."""
    yield from fresh_database(postgres_server, template=template_database)


@pytest.fixture
def empty_database_url(postgres_server: str) -> Iterator[str]:
    """URL of a fresh database with no schema at all."""
    yield from fresh_database(postgres_server)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A fresh, migrated, open database."""
    opened = Database.open(database_url)
    yield opened
    opened.close()


def stop_syncing(server_url: str) -> None:
    """No test loses power: what a killed process has written is safe in the operating system's cache."""
    with psycopg.connect(server_url, autocommit=True) as connection:
        for name in ("fsync", "full_page_writes", "synchronous_commit"):
            connection.execute(f"ALTER SYSTEM SET {name} = off")
        connection.execute("ALTER SYSTEM SET max_wal_size = '128MB'")
        connection.execute("SELECT pg_reload_conf()")


def create_template(server_url: str) -> str:
    """Name of a database with the newest schema and no connections: the others are copies of it."""
    upgrade(create_database(server_url, "driftguard_template"))
    return "driftguard_template"


def fresh_database(server_url: str, template: str = "template1") -> Iterator[str]:
    name = f"test_{uuid4().hex}"
    yield create_database(server_url, name, template)
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def create_database(server_url: str, name: str, template: str = "template1") -> str:
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
    return parse_url(server_url).set(database=name).render_as_string(hide_password=False)
