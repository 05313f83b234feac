"""`python -m driftguard_engine` as an operator and a supervisor meet it: a process of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from driftguard_engine.drafters import unended_starts
from driftguard_engine.drafters.state_file import SavedDraft, save_draft, saved_version
from driftguard_engine.server.auth import hash_of

from tests.engine.server.processes import (
    engine_main,
    engine_options,
    engine_process,
    environment,
    signalled_while_it_loads,
)
from tests.engine.server.serving import Receiver, wait_until
from tests.forked import forked
from tests.ports import unserved_port

pytestmark = pytest.mark.slow


def command(models: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "driftguard_engine", *engine_options(models, *options)]


def refused(models: Path, directory: Path, *options: str) -> tuple[int, str]:
    """Exit code and standard error of a process that must not start."""
    log = directory / "log"
    with forked(engine_main, engine_options(models, *options), log, environment()) as process:
        assert process.stdout.read() == ""
        return process.wait(60), log.read_text()


@pytest.mark.parametrize("told", [False, True])
def test_its_threads_leave_a_core_to_what_serves_the_requests(models: Path, told: bool) -> None:
    """On two cores threads that wait for each other made the engine take 1.7 times as long."""
    cores = len(os.sched_getaffinity(0))
    asked = environment(OMP_NUM_THREADS=str(cores))
    if not told:
        del asked["OMP_NUM_THREADS"]
    process = subprocess.Popen(
        [sys.executable, "-m", "driftguard_engine", "--target", str(models / "target"), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env=asked,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split(" on ")[1].split()[0]
        threads = httpx.get(f"{url}/admin/info").json()["threads"]
    finally:
        process.kill()
        process.communicate()
    assert threads == cores if told else 1 <= threads <= max(cores - 1, 1)


def test_one_line_says_where_it_serves_what(models: Path) -> None:
    process = subprocess.Popen(
        command(models, "--port", "0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready, process.communicate()[1]
        url = ready.split(" on ")[1].split()[0]
        info = httpx.get(f"{url}/admin/info").json()
        assert ready == (
            f"engine ready on {url} target=target draft=poor "
            f"draft_version={info['draft']['version']} method=draft_model\n"
        )
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0
        assert [line for line in log.splitlines() if not line.startswith("timestamp=")] == []
    finally:
        process.kill()
        process.communicate()


def test_it_serves_where_its_output_cannot_be_written(models: Path) -> None:
    """As in a file on a full disk."""

    def answers() -> bool:
        assert process.poll() is None
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        except httpx.TransportError:
            return False

    with (
        unserved_port() as port,
        Path("/dev/full").open("w") as full,
        subprocess.Popen(
            command(models, "--port", str(port)), stdout=full, stderr=full, env=environment()
        ) as process,
    ):
        try:
            wait_until(answers, "it answers")
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
    assert code in (0, 120), "it ended by itself"  # 120: Python itself could not write at its end


def test_a_port_in_use_is_one_line_and_exit_code_1(models: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, error = refused(models, tmp_path, "--port", str(port))
    assert code == 1
    assert error == f"driftguard engine: 127.0.0.1:{port}: cannot listen there: the port is in use\n"


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (["--target", "/nowhere"], 1, "/nowhere"),
        (["--max-batch", "0"], 2, "max_batch: 0 is not"),
        (["--num-speculative-tokens", "99"], 2, "max_speculative_tokens"),
        (["--host", "0.0.0.0"], 2, "host 0.0.0.0: any address other than loopback needs an API key"),
        (["--api-key-hash", "secret"], 2, "api_key_hash: must be the 64 hex digits"),
        (["--sidecar", "localhost:8200"], 2, "sidecar: not a URL"),
        (["--sidecar", "http://127.0.0.1:82OO"], 2, "sidecar: host or port of the URL cannot be read"),
        (["--sidecar", "http://127.0.0.1:82000"], 2, "sidecar: host or port of the URL cannot be read"),
        (["--sidecar", "http://"], 2, "sidecar: host or port of the URL cannot be read"),
        (
            ["--sidecar", "http://127.0.0.1:1", "--spool-dir", "~no.such.user/spool"],
            2,
            "spool_dir: ~no.such.user/spool: there is no such home directory; give --spool-dir, or set HOME",
        ),
        (["--capture-fraction", "1.5"], 2, "capture_fraction: 1.5 is not between 0 and 1"),
        (["--capture-fraction", "nan"], 2, "capture_fraction: nan is not between 0 and 1"),
        (["--server-name", ""], 2, "server_name: has 0 characters"),
        (["--server-name", "caf\udce9"], 2, "server_name: not valid UTF-8"),
        (
            ["--host", "no.such.invalid", "--api-key-hash", "0" * 64],
            1,
            "no.such.invalid:8100: cannot",
        ),
    ],
)
def test_what_cannot_start_says_why_in_one_line(
    models: Path, tmp_path: Path, options: list[str], code: int, reason: str
) -> None:
    exit_code, error = refused(models, tmp_path, *options)
    assert reason in error
    assert error.count("\n") == 1, error
    assert exit_code == code


def test_another_address_starts_with_a_key_and_guards_admin(models: Path) -> None:
    with engine_process(models, "--host", "0.0.0.0", DRIFTGUARD_API_KEY="secret") as (_, url, _ready):
        url = url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/admin/info").status_code == 401
        bearer = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{url}/admin/info", headers=bearer).status_code == 200
    with engine_process(models, "--api-key-hash", hash_of("other")) as (_, url, _ready):
        assert httpx.get(f"{url}/admin/info").status_code == 401


def ask(url: str, count: int) -> None:
    for number in range(count):
        body = {"prompt": "x", "max_tokens": 3, "seed": number}
        httpx.post(f"{url}/v1/completions", json=body).raise_for_status()


def spooled(directory: Path) -> list[dict[str, object]]:
    files = sorted(directory.rglob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_records_survive_kill_9_and_are_replayed_once(models: Path, tmp_path: Path) -> None:
    with unserved_port() as port:
        survive_kill_9(models, tmp_path, port)


def survive_kill_9(models: Path, tmp_path: Path, port: int) -> None:
    options = ["--sidecar", f"http://127.0.0.1:{port}", "--spool-dir", str(tmp_path)]
    with engine_process(models, *options) as (process, url, _):
        ask(url, 7)
        wait_until(lambda: len(spooled(tmp_path)) == 7, "the records are on disk")
        process.kill()
        process.wait()
    left = [line["record_id"] for line in spooled(tmp_path)]
    with Receiver(port) as receiver, engine_process(models, *options) as (process, url, _):
        ask(url, 2)
        wait_until(lambda: len(receiver.stored()) == 9, "all records arrived")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    ids = [line["record_id"] for line in receiver.stored()]
    assert ids[:7] == left
    assert len(set(ids)) == 9
    assert spooled(tmp_path) == []


def test_sigterm_lets_answers_finish_and_spools_their_records(models: Path, tmp_path: Path) -> None:
    options = ["--sidecar", "http://127.0.0.1:1", "--spool-dir", str(tmp_path)]
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with engine_process(models, *options) as (process, url, _):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            chunks = response.iter_lines()
            next(chunks)
            process.send_signal(signal.SIGTERM)
            lines = [line for line in chunks if line]
        assert lines[-1] == "data: [DONE]"
        assert process.wait(60) == 0
    [record] = spooled(tmp_path)
    assert record["output_tokens"] == 200


def test_the_promoted_draft_serves_again_after_kill_9(models: Path, tmp_path: Path) -> None:
    options = ["--state-dir", str(tmp_path)]
    with engine_process(models, *options) as (process, url, _):
        body = {"directory": str(models / "good"), "version": "better"}
        httpx.post(f"{url}/admin/drafts", json=body, timeout=30).raise_for_status()
        httpx.post(f"{url}/admin/drafts/better/activate").raise_for_status()
        process.kill()
        process.wait()
    with engine_process(models, *options) as (_, url, ready):
        assert "draft_version=better" in ready
        assert httpx.get(f"{url}/admin/info").json()["draft"]["version"] == "better"


def test_a_promoted_draft_with_which_it_is_killed_three_times_is_given_up(
    models: Path, tmp_path: Path
) -> None:
    """Ends on request are none of these times."""
    options = ["--state-dir", str(tmp_path)]
    saved = SavedDraft(f"{models / 'target'} draft_model {models / 'poor'}", str(models / "good"), "better")
    save_draft(tmp_path, saved)
    for number in [signal.SIGTERM] * 4 + [signal.SIGKILL] * 3:
        with engine_process(models, *options) as (process, _, ready):
            assert "draft_version=better" in ready
            process.send_signal(number)
            process.wait(60)
    with engine_process(models, *options) as (_, url, _):
        info = httpx.get(f"{url}/admin/info").json()
    assert (info["draft"]["directory"], info["given_up"]) == (str(models / "poor"), "better")
    assert not info["activated"]


STOPPED_WHILE_IT_IMPORTS = """
import os, signal, sys
from driftguard_engine.__main__ import app

class StopsAtTorch:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, StopsAtTorch())
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as of process 1 in a container that sets nothing else
app(sys.argv[1:])
"""


def test_an_end_on_request_while_it_imports_is_obeyed_in_a_container_too(models: Path) -> None:
    arguments = engine_options(models, "--port", "0")
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED_WHILE_IT_IMPORTS, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == ""
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_engines_that_share_a_state_directory_do_not_give_up_the_draft_of_the_first(
    models: Path, tmp_path: Path
) -> None:
    state_dir = tmp_path / "state"
    saved = SavedDraft(f"{models / 'target'} draft_model {models / 'poor'}", str(models / "good"), "better")
    save_draft(state_dir, saved)
    with engine_process(models, "--state-dir", str(state_dir)) as (process, _, ready):
        assert "draft_version=better" in ready
        counted = (state_dir / unended_starts.FILE_NAME).read_bytes()
        for start in range(4):
            own = tmp_path / f"start {start}"
            own.mkdir()
            code, error = refused(models, own, "--port", "0", "--state-dir", str(state_dir))
            assert code == 1
            assert error == (
                f"driftguard engine: state_dir: another engine uses {state_dir}; give each its own\n"
            )
        assert saved_version(state_dir) == "better"
        assert (state_dir / unended_starts.FILE_NAME).read_bytes() == counted
        process.kill()
        process.wait()
    with engine_process(models, "--state-dir", str(state_dir)) as (_, _, ready):
        assert "draft_version=better" in ready


def test_state_and_spool_of_one_engine_may_share_a_directory(models: Path, tmp_path: Path) -> None:
    both = str(tmp_path / "both")
    options = ("--state-dir", both, "--spool-dir", both, "--sidecar", "http://127.0.0.1:1")
    with engine_process(models, *options) as (_, _, ready):
        assert "engine ready" in ready


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_end_on_request_while_it_loads_is_none_of_these_times_either(
    models: Path, tmp_path: Path, number: signal.Signals
) -> None:
    saved = SavedDraft(f"{models / 'target'} draft_model {models / 'poor'}", str(models / "good"), "better")
    save_draft(tmp_path, saved)
    arguments = [str(int(number)), *engine_options(models, "--port", "0", "--state-dir", str(tmp_path))]
    for _ in range(4):
        with forked(signalled_while_it_loads, arguments, tmp_path / "log", environment()) as process:
            assert process.stdout.read() == ""
            assert process.wait(60) == 0
    assert saved_version(tmp_path) == "better"
    assert not (tmp_path / unended_starts.FILE_NAME).exists()
