"""Telemetry against a sidecar that fails, comes back, is full, refuses; over real HTTP and real files."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from driftguard_engine.telemetry import sender
from driftguard_engine.telemetry import telemetry as telemetry_module
from driftguard_engine.telemetry.spool import SpoolError
from driftguard_engine.telemetry.telemetry import Telemetry, UnreadableAuthorities, UnusableProxy

from driftguard.records import decode_record
from tests.client.foreign_answers import FOREIGN_ANSWERS
from tests.engine.server.serving import PATIENCE_SECONDS, Receiver, Reply, wait_until
from tests.engine.telemetry.finished import finished_request
from tests.ports import unserved_port
from tests.tls import tls_sidecar

CAPTURES = "/api/v1/captures"


@pytest.fixture(autouse=True)
def _collect_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_module, "COLLECT_EVERY_SECONDS", 0.05)


@pytest.fixture
def port() -> Iterator[int]:
    """Nobody answers there, and no other process can take it, until a Receiver does."""
    with unserved_port() as number:
        yield number


@contextmanager
def sending(url: str, spool_dir: Path | None, **options: Any) -> Iterator[Telemetry]:
    telemetry = Telemetry(url, spool_dir, "engine-1", "big", send_every_seconds=0.0, **options)
    telemetry.start()
    try:
        yield telemetry
    finally:
        telemetry.close(limit_seconds=0.1)


def segments(lines: list[dict[str, Any]]) -> list[str]:
    return [line["segment"] for line in lines]


def numbered(*numbers: int) -> list[str]:
    return [f"segment-{number}" for number in numbers]


def spool_files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.jsonl"))


def test_a_burst_arrives_as_json_lines_in_full_batches_in_order_with_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry_module, "REQUEST_TIMEOUT", httpx.Timeout(None))  # one answer is held
    asked, release = threading.Event(), threading.Event()

    def hold(path: str, lines: list[dict[str, Any]]) -> Reply:
        asked.set()
        release.wait(PATIENCE_SECONDS)
        return Reply()

    with Receiver(answer=hold) as receiver, sending(receiver.url, tmp_path, api_key="secret") as telemetry:
        telemetry.finished(finished_request(0))
        assert asked.wait(PATIENCE_SECONDS), "the first record was sent"
        for number in range(1, 1201):
            telemetry.finished(finished_request(number))
        wait_until(lambda: telemetry.state.spooled_records == 1201, "the burst is on disk")
        release.set()
        wait_until(lambda: len(receiver.stored()) == 1201, "all records arrived")
        assert segments(receiver.stored()) == numbered(*range(1201))
        assert [len(batch.lines) for batch in receiver.batches] == [1, 500, 500, 200]
        assert receiver.batches[0].headers["Content-Type"] == "application/x-ndjson"
        assert receiver.batches[0].headers["Authorization"] == "Bearer secret"
        for line in receiver.stored():
            decode_record(json.dumps(line))
        wait_until(lambda: not spool_files(tmp_path), "nothing is left on disk")
        assert telemetry.state.records.sent == 1201
        assert receiver.stored(CAPTURES) == []


def test_a_batch_that_is_not_full_gathers_on_disk_until_it_is_due(tmp_path: Path) -> None:
    with Receiver() as receiver:
        telemetry = Telemetry(receiver.url, tmp_path, "engine-1", "big", send_every_seconds=3600.0)
        telemetry.finished(finished_request(0))
        telemetry.start()
        wait_until(lambda: len(receiver.stored()) == 1, "what is there at the start goes at once")
        for number in range(1, 501):
            telemetry.finished(finished_request(number))
        wait_until(lambda: len(receiver.stored()) == 501, "a full batch goes at once")
        telemetry.finished(finished_request(501))
        wait_until(lambda: bool(spool_files(tmp_path)), "the next record is on disk")
        assert len(receiver.batches) == 2
        telemetry.close()
        assert segments(receiver.stored()) == numbered(*range(502))
        assert not spool_files(tmp_path)


def test_records_wait_on_disk_while_the_sidecar_is_away_and_are_replayed_oldest_first(
    tmp_path: Path, port: int
) -> None:
    with sending(f"http://127.0.0.1:{port}", tmp_path) as telemetry:
        for number in range(3):
            telemetry.finished(finished_request(number))
        wait_until(lambda: telemetry.state.records.failed_attempts > 0, "the sidecar was missed")
        assert spool_files(tmp_path)
        telemetry.finished(finished_request(3))
        with Receiver(port) as receiver:
            wait_until(lambda: len(receiver.stored()) == 4, "all records arrived")
            assert segments(receiver.stored()) == numbered(0, 1, 2, 3)
            wait_until(lambda: not spool_files(tmp_path), "nothing is left on disk")
    assert telemetry.state.records.dropped == 0


def test_a_restart_sends_what_the_last_process_spooled(tmp_path: Path, port: int) -> None:
    with sending(f"http://127.0.0.1:{port}", tmp_path) as telemetry:
        telemetry.finished(finished_request(0))
        telemetry.finished(finished_request(1))
    waiting = [json.loads(line) for file in spool_files(tmp_path) for line in file.read_text().splitlines()]
    assert segments(waiting) == numbered(0, 1)
    with Receiver() as receiver, sending(receiver.url, tmp_path) as telemetry:
        telemetry.finished(finished_request(2))
        wait_until(lambda: len(receiver.stored()) == 3, "all records arrived")
        assert segments(receiver.stored()) == numbered(0, 1, 2)
        assert receiver.stored()[0]["record_id"] == waiting[0]["record_id"]


def test_without_a_spool_directory_records_wait_in_memory(port: int) -> None:
    with sending(f"http://127.0.0.1:{port}", None) as telemetry:
        telemetry.finished(finished_request(0))
        wait_until(lambda: telemetry.state.records.failed_attempts > 0, "the sidecar was missed")
        with Receiver(port) as receiver:
            wait_until(lambda: segments(receiver.stored()) == numbered(0), "the record arrived")


def test_what_is_lost_without_a_spool_directory_is_counted(port: int) -> None:
    with sending(f"http://127.0.0.1:{port}", None) as telemetry:
        telemetry.finished(finished_request(0))
    assert telemetry.state.records.dropped == 1


def test_an_answer_that_got_lost_is_sent_again_under_the_same_id(tmp_path: Path) -> None:
    answers = [Reply(status=500), Reply(status=503), Reply()]
    with (
        Receiver(answer=lambda path, lines: answers.pop(0)) as receiver,
        sending(receiver.url, tmp_path) as telemetry,
    ):
        telemetry.finished(finished_request(0))
        wait_until(lambda: len(receiver.batches) == 3, "three attempts")
        ids = {line["record_id"] for batch in receiver.batches for line in batch.lines}
        assert len(ids) == 1
        wait_until(lambda: telemetry.state.records.sent == 1, "it counts once")


def test_retry_after_is_honoured(tmp_path: Path) -> None:
    answers = [Reply(status=429, headers={"Retry-After": "1"}), Reply()]
    with (
        Receiver(answer=lambda path, lines: answers.pop(0)) as receiver,
        sending(receiver.url, tmp_path) as telemetry,
    ):
        telemetry.finished(finished_request(0))
        wait_until(lambda: len(receiver.stored()) == 1, "the record arrived")
    assert receiver.batches[1].received_at - receiver.batches[0].received_at >= 1.0


def test_a_batch_that_is_too_large_is_split_until_it_fits(tmp_path: Path) -> None:
    def at_most_three(path: str, lines: list[dict[str, Any]]) -> Reply:
        return Reply(status=413 if len(lines) > 3 else 200)

    with Receiver(answer=at_most_three) as receiver, sending(receiver.url, tmp_path) as telemetry:
        for number in range(10):
            telemetry.finished(finished_request(number))
        wait_until(lambda: len(receiver.stored()) == 10, "all records arrived")
        assert segments(receiver.stored()) == numbered(*range(10))
    assert telemetry.state.records.refused == 0


def test_a_single_line_that_is_too_large_is_refused_not_retried_for_ever(tmp_path: Path) -> None:
    with (
        Receiver(answer=lambda path, lines: Reply(status=413)) as receiver,
        sending(receiver.url, tmp_path) as telemetry,
    ):
        telemetry.finished(finished_request(0))
        wait_until(lambda: telemetry.state.records.refused == 1, "it is given up")
    assert telemetry.state.records.sent == 0


def test_refused_lines_are_counted_and_the_good_ones_are_not_sent_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = {
        "accepted": 2,
        "duplicates": 0,
        "detail": "1 of 3 records are refused",
        "errors": [{"line": 2, "field": "accepted", "detail": "more than drafted"}],
        "errors_total": 1,
    }
    refusal = Reply(422, {"Content-Type": "application/problem+json"}, json.dumps(problem).encode())
    with (
        Receiver(answer=lambda path, lines: refusal) as receiver,
        sending(receiver.url, tmp_path) as telemetry,
    ):
        for number in range(3):
            telemetry.finished(finished_request(number))
        wait_until(lambda: telemetry.state.records.refused == 1, "the refusal is counted")
        wait_until(lambda: not spool_files(tmp_path), "nothing is left to send")
    assert telemetry.state.records.sent == 2
    assert len(receiver.batches) == 1
    assert "2: accepted: more than drafted" in capsys.readouterr().out


def test_a_wrong_key_loses_nothing(tmp_path: Path) -> None:
    answers = [Reply(status=401), Reply(status=403), Reply()]
    with (
        Receiver(answer=lambda path, lines: answers.pop(0)) as receiver,
        sending(receiver.url, tmp_path) as telemetry,
    ):
        telemetry.finished(finished_request(0))
        wait_until(lambda: len(receiver.stored()) == 1, "the record arrived")
    assert telemetry.state.records.refused == 0


@pytest.mark.parametrize("foreign", FOREIGN_ANSWERS)
def test_something_else_at_the_address_is_no_sidecar_and_loses_nothing(tmp_path: Path, foreign: str) -> None:
    answers = [Reply(*FOREIGN_ANSWERS[foreign]), Reply()]
    with (
        Receiver(answer=lambda path, lines: answers.pop(0)) as receiver,
        sending(receiver.url, tmp_path) as telemetry,
    ):
        telemetry.finished(finished_request(0))
        wait_until(lambda: not answers and telemetry.state.records.sent == 1, "the record arrived")
    assert (telemetry.state.records.failed_attempts, telemetry.state.records.refused) == (1, 0)


def test_a_full_spool_drops_its_oldest_and_counts_them(tmp_path: Path, port: int) -> None:
    with sending(f"http://127.0.0.1:{port}", tmp_path, max_spool_bytes=1_000_000) as telemetry:
        for number in range(4000):
            telemetry.finished(finished_request(number))
        wait_until(lambda: telemetry.state.records.dropped > 0, "the spool overflowed")
    left = [json.loads(line) for file in spool_files(tmp_path) for line in file.read_text().splitlines()]
    assert len(left) + telemetry.state.records.dropped == 4000
    assert segments(left)[-1] == "segment-3999"
    assert sum(file.stat().st_size for file in spool_files(tmp_path)) <= 1_000_000


def test_a_full_buffer_drops_its_oldest_without_blocking() -> None:
    telemetry = Telemetry("http://127.0.0.1:1", None, "engine-1", "big", max_buffered=10)
    for number in range(25):  # not started: nobody empties the buffer
        telemetry.finished(finished_request(number))
    assert telemetry.state.records.dropped == 15
    assert telemetry.state.waiting_records == 10


def test_a_spool_that_cannot_be_written_falls_back_to_memory(tmp_path: Path, port: int) -> None:
    with sending(f"http://127.0.0.1:{port}", tmp_path) as telemetry:
        telemetry.finished(finished_request(0))
        wait_until(lambda: telemetry.state.records.failed_attempts > 0, "the first record was read back")
        (tmp_path / "records").rename(tmp_path / "gone")
        telemetry.finished(finished_request(1))
        wait_until(lambda: telemetry.state.waiting_records == 2, "the second record waits in memory")
        (tmp_path / "gone").rename(tmp_path / "records")
        with Receiver(port) as receiver:
            wait_until(lambda: len(receiver.stored()) == 2, "both arrived")
            assert segments(receiver.stored()) == numbered(0, 1)


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """As a file system that the kernel turned read-only: nothing is written or removed there, and removing
    what does not exist is refused in the same way. Modes of files do not stop a test that runs as root."""
    opened, unlink = Path.open, Path.unlink

    def refuse(path: Path) -> None:
        if directory in path.parents:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def open_to_read(self: Path, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if not mode.startswith("r"):
            refuse(self)
        return opened(self, mode, *arguments, **named)

    def refuse_to_unlink(self: Path, missing_ok: bool = False) -> None:
        refuse(self)
        unlink(self, missing_ok)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Path, "open", open_to_read)
        patched.setattr(Path, "unlink", refuse_to_unlink)
        yield


def test_a_spool_that_turns_read_only_loses_nothing_and_all_arrives_in_order(
    tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with sending(f"http://127.0.0.1:{port}", tmp_path) as telemetry:
        telemetry.finished(finished_request(0))
        wait_until(lambda: telemetry.state.records.failed_attempts > 0, "the first record is on disk")
        with read_only(tmp_path):
            telemetry.finished(finished_request(1))
            wait_until(lambda: telemetry.state.waiting_records == 2, "the second record waits in memory")
            with Receiver(port) as receiver:
                for number in range(2, 5):  # each after a batch whose file could not be removed, or had none
                    wait_until(lambda sent=number: len(receiver.stored()) == sent, "the others arrived")  # type: ignore[misc]
                    telemetry.finished(finished_request(number))
                wait_until(lambda: telemetry.state.records.sent == 5, "all arrived")
                assert segments(receiver.stored()) == numbered(*range(5))
    assert telemetry.state.records.dropped == 0
    told = capsys.readouterr().out
    assert told.count("a spool file cannot be removed") == 1
    assert "telemetry failed unexpectedly" not in told
    [stayed] = spool_files(tmp_path)
    assert str(stayed) in told
    with Receiver() as again, sending(again.url, tmp_path):
        wait_until(lambda: segments(again.stored()) == numbered(0), "it is sent again under the same id")
        assert again.stored()[0]["record_id"] == receiver.stored()[0]["record_id"]
        wait_until(lambda: not spool_files(tmp_path), "it is removed then")


@pytest.mark.parametrize("later", [[], [2]])
def test_what_waits_in_memory_is_on_disk_once_that_can_be_written_again(
    tmp_path: Path, port: int, later: list[int]
) -> None:
    with sending(f"http://127.0.0.1:{port}", tmp_path) as telemetry:
        telemetry.finished(finished_request(0))
        wait_until(lambda: telemetry.state.records.failed_attempts > 0, "the first record is on disk")
        spooled = telemetry.state.spool_bytes
        with read_only(tmp_path):
            telemetry.finished(finished_request(1))
            wait_until(lambda: telemetry.state.spool_bytes > spooled, "the second record waits in memory")
        for number in later:
            telemetry.finished(finished_request(number))
    assert telemetry.state.records.dropped == 0
    assert telemetry.state.spooled_records == 2 + len(later)
    with Receiver() as receiver, sending(receiver.url, tmp_path):
        wait_until(lambda: segments(receiver.stored()) == numbered(0, 1, *later), "all arrived, in order")


def test_captured_token_ids_that_cannot_be_erased_are_named_and_never_sent(
    tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with sending(f"http://127.0.0.1:{port}", tmp_path, capture_fraction=1.0) as telemetry:
        telemetry.finished(finished_request(0))
    captures = tmp_path / "captures"
    [stayed] = spool_files(captures)
    with Receiver() as receiver, read_only(captures), sending(receiver.url, tmp_path):
        wait_until(lambda: segments(receiver.stored()) == numbered(0), "the record arrived")
        assert receiver.stored(CAPTURES) == []
    told = capsys.readouterr().out
    assert "a spool file cannot be removed" in told
    assert str(stayed) in told
    assert "erased token ids" not in told


def test_what_the_memory_still_holds_at_the_end_is_counted_as_lost(tmp_path: Path, port: int) -> None:
    with sending(f"http://127.0.0.1:{port}", tmp_path) as telemetry:
        telemetry.finished(finished_request(0))
        wait_until(lambda: telemetry.state.records.failed_attempts > 0, "the first record was read back")
        (tmp_path / "records").rename(tmp_path / "gone")
        telemetry.finished(finished_request(1))
    assert telemetry.state.records.dropped == 1


def test_a_torn_last_line_is_left_out(tmp_path: Path, port: int) -> None:
    with sending(f"http://127.0.0.1:{port}", tmp_path) as telemetry:
        telemetry.finished(finished_request(0))
        telemetry.finished(finished_request(1))
    [file] = spool_files(tmp_path)
    file.write_bytes(file.read_bytes()[:-10])
    with Receiver() as receiver, sending(receiver.url, tmp_path):
        wait_until(lambda: bool(receiver.stored()), "the whole record arrived")
    assert segments(receiver.stored()) == numbered(0)


def test_two_engines_cannot_share_a_spool(tmp_path: Path) -> None:
    with sending("http://127.0.0.1:1", tmp_path), pytest.raises(SpoolError, match="another engine uses"):
        Telemetry("http://127.0.0.1:1", tmp_path, "engine-2", "big")


def test_an_unusable_spool_directory_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SpoolError, match=f"{file}/spool: cannot be used"):
        Telemetry("http://127.0.0.1:1", file / "spool", "engine-1", "big")


def test_records_reach_a_sidecar_beside_the_engine_by_the_authority_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tls_sidecar(tmp_path) as sidecar:
        monkeypatch.setenv("SSL_CERT_FILE", str(sidecar.authority))
        with sending(sidecar.url, None) as telemetry:
            telemetry.finished(finished_request(0))
            wait_until(lambda: telemetry.state.records.sent == 1, "the record is stored")
    assert sidecar.paths == ["/api/v1/records"]


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_authorities_that_cannot_be_read_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    file = tmp_path / "authority.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    with pytest.raises(UnreadableAuthorities, match=f"^SSL_CERT_FILE: no certificates in {file}"):
        Telemetry("https://sidecar", tmp_path / "spool", "engine-1", "big")


@pytest.mark.parametrize("address", ["socks5://127.0.0.1:1", "http://127.0.0.1:31x28"])
def test_a_proxy_that_cannot_be_used_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """Nothing would ever be sent, nor kept in the spool."""
    monkeypatch.setenv("ALL_PROXY", address)
    named = "^HTTP_PROXY, HTTPS_PROXY or ALL_PROXY: the sidecar cannot be asked through it"
    with pytest.raises(UnusableProxy, match=named):
        Telemetry("http://sidecar:8200", tmp_path / "spool", "engine-1", "big")


@pytest.mark.parametrize(
    ("variable", "value"), [("ALL_PROXY", "socks5://127.0.0.1:1"), ("SSL_CERT_FILE", "/nowhere/ca.pem")]
)
def test_a_proxy_or_authorities_that_cannot_be_used_do_not_matter_beside_the_sidecar(
    port: int, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with Receiver(port), sending(f"http://127.0.0.1:{port}", None) as telemetry:
        telemetry.finished(finished_request(0))
        wait_until(lambda: telemetry.state.records.sent == 1, "the record is stored")


def test_without_a_url_nothing_happens(tmp_path: Path) -> None:
    telemetry = Telemetry(None, tmp_path / "spool", "engine-1", "big", capture_fraction=1.0)
    telemetry.start()
    telemetry.finished(finished_request(0))
    telemetry.close()
    assert not (tmp_path / "spool").exists()
    assert telemetry.state.waiting_records == 0


def test_capture_sends_token_ids_of_whole_answers_only(tmp_path: Path) -> None:
    with Receiver() as receiver, sending(receiver.url, tmp_path, capture_fraction=1.0) as telemetry:
        telemetry.finished(finished_request(0))
        telemetry.finished(finished_request(1, finish_reason="abort"))
        wait_until(lambda: len(receiver.stored()) == 2, "both records arrived")
        wait_until(lambda: bool(receiver.stored(CAPTURES)), "a capture arrived")
    record = receiver.stored()[0]
    assert receiver.stored(CAPTURES) == [
        {
            "record_id": record["record_id"],
            "segment": "segment-0",
            "server": "engine-1",
            "target": "big",
            "captured_at": record["ended_at"],
            "prompt_token_ids": [7, 8, 9],
            "output_token_ids": [1, 2, 3, 4, 5],
            "draft_version": "abc123",
        }
    ]


def test_token_ids_touch_the_disk_only_while_capture_is_on(tmp_path: Path, port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    with sending(url, tmp_path) as telemetry:
        telemetry.finished(finished_request(0))
    assert not any("token_ids" in file.read_text() for file in spool_files(tmp_path))
    with sending(url, tmp_path, capture_fraction=1.0) as telemetry:
        telemetry.finished(finished_request(1))
    assert any("output_token_ids" in file.read_text() for file in spool_files(tmp_path))
    with sending(url, tmp_path):
        pass
    assert not any("token_ids" in file.read_text() for file in spool_files(tmp_path))


def test_a_sidecar_that_forbids_capture_is_asked_again_a_minute_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbid(path: str, lines: list[dict[str, Any]]) -> Reply:
        return Reply(status=403 if path == CAPTURES else 200)

    with (
        Receiver(answer=forbid) as receiver,
        sending(receiver.url, tmp_path, capture_fraction=1.0) as telemetry,
    ):
        for number in range(3):
            telemetry.finished(finished_request(number))
            wait_until(lambda seen=number: len(receiver.stored()) == seen + 1, "the record arrived")  # type: ignore[misc]
            wait_until(lambda: telemetry.state.captures.dropped == 1, "the captured request is forgotten")
        asked = [batch for batch in receiver.batches if batch.path == CAPTURES]
        assert len(asked) == 1
        assert telemetry._capture_from <= time.monotonic() + 60  # whoever turns it on waits for it
        monkeypatch.setattr(telemetry, "_capture_from", 0.0)
        telemetry.finished(finished_request(3))
        wait_until(lambda: telemetry.state.captures.dropped == 2, "asked again, forbidden again")
    assert capsys.readouterr().out.count("keeps no captured token ids") == 1
    assert not any("token_ids" in file.read_text() for file in spool_files(tmp_path))


def test_an_unexpected_failure_restarts_sending_and_loses_nothing_spooled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry_module, "RESTART_AFTER_SECONDS", 0.05)
    failures = [RuntimeError("a bug")]
    post = sender.Lane._post

    async def fail_once(self: sender.Lane, body: bytes, lines: int) -> Any:
        if failures:
            raise failures.pop()
        return await post(self, body, lines)

    monkeypatch.setattr(sender.Lane, "_post", fail_once)
    with Receiver() as receiver, sending(receiver.url, tmp_path) as telemetry:
        telemetry.finished(finished_request(0))
        wait_until(lambda: segments(receiver.stored()) == numbered(0), "the record arrived")
