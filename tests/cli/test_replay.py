from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import numpy as np
import pytest
from msgspec import structs
from typer.testing import CliRunner

from driftguard.cli import app
from driftguard.cli.replay import run_replay
from driftguard.errors import BadSettings
from driftguard.records import UNREADABLE_JSON, AcceptanceRecord, encode_record

NOT_AN_ANSWER = "not an answer of Prometheus' /api/v1/query_range"
LATIN = b'{"status": "\xe9"}'
BEGIN = datetime(2026, 1, 5, tzinfo=UTC)


def why_unreadable(content: bytes) -> str:
    """In the words of the installed msgspec."""
    with pytest.raises(UNREADABLE_JSON) as raised:
        msgspec.json.decode(content)
    return str(raised.value)


def records(
    means: list[float], *, seed: int = 1, version: str = "v1", kind: Any = "request", number_from: int = 1
) -> Iterator[AcceptanceRecord]:
    rng = np.random.default_rng(seed)
    for number, mean in enumerate(means, start=number_from):
        precision = mean * (1 - mean) / 0.0144 - 1
        accepted = int(rng.binomial(100, rng.beta(mean * precision, (1 - mean) * precision)))
        ended = BEGIN + timedelta(seconds=number)
        yield AcceptanceRecord(
            record_id=UUID(int=number),
            kind=kind,
            started_at=ended,
            ended_at=ended,
            server="s1",
            target="big",
            draft="small",
            draft_version=version,
            method="draft_model",
            segment="chat",
            steps=25,
            drafted=100,
            accepted=accepted,
            emitted=accepted + 25,
            fidelity="request",
        )


def write(path: Path, *groups: Iterator[AcceptanceRecord]) -> Path:
    path.write_bytes(b"".join(encode_record(record) + b"\n" for group in groups for record in group))
    return path


def run(*files: Path, as_json: bool = True, every: float = 100_000.0) -> tuple[int, list[Any], str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = run_replay(list(files), json=as_json, false_alarm_every=every, minimum_drop=0.05, out=out, err=err)
    events = [json.loads(line) for line in out.getvalue().splitlines()] if as_json else []
    return code, events, out.getvalue(), err.getvalue()


def test_events_name_the_line_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", records([0.7] * 1_500 + [0.4] * 800 + [0.7] * 1_000, seed=2))
    code, events, _, err = run(path)
    assert (code, err) == (0, "")
    assert [event["event"] for event in events] == ["baseline_ready", "incident_opened", "incident_closed"]
    ready, opened, closed = events
    assert ready["stream"] == {
        "server": "s1",
        "target": "big",
        "draft": "small",
        "draft_version": "v1",
        "method": "draft_model",
    }
    assert ready["segment"] == "chat"
    assert ready["reason"] == "first baseline of the segment"
    assert ready["stratum"].startswith("request, num_speculative_tokens unknown")
    assert ready["fall_below"] < ready["mean_per_request"] < ready["rise_above"]
    assert opened["direction"] == "down"
    assert opened["interval"][0] <= 1_501 <= opened["interval"][1]
    line = path.read_text().splitlines()[opened["change_point"] - 1]
    moment = datetime.fromisoformat(json.loads(line)["ended_at"])
    assert datetime.fromisoformat(opened["change_point_at"]) == moment
    (segment,) = opened["segments"]
    assert segment["segment"] == "chat"
    assert segment["before"] == pytest.approx(0.7, abs=0.02)
    assert segment["after"] == pytest.approx(0.4, abs=0.1)
    assert closed["opened_record"] == opened["record"]
    assert closed["record"] > 2_300


def test_a_daily_rhythm_is_told(tmp_path: Path) -> None:
    hours = np.arange(5 * 24 * 30) // 30
    means = (0.6 + 0.12 * np.sin(2.0 * np.pi * hours / 24.0)).tolist()
    at = [BEGIN + timedelta(minutes=2 * number) for number in range(len(means))]
    moved = (
        structs.replace(record, started_at=end, ended_at=end)
        for record, end in zip(records(means), at, strict=True)
    )
    path = write(tmp_path / "r.jsonl", moved)
    (event,) = [event for event in run(path)[1] if event["event"] == "profile_learned"]
    assert (event["segment"], event["cycles"]) == ("chat", 2)
    assert event["amplitude"] == pytest.approx(0.12, abs=0.03)
    text = run(path, as_json=False)[2]
    assert "segment chat depends on the hour of day, by 0.1" in text
    assert "learned from 2 days" in text


def test_numbers_go_on_over_files_and_count_probes_and_bad_lines(tmp_path: Path) -> None:
    first = write(tmp_path / "1.jsonl", records([0.7] * 600))
    probes = write(tmp_path / "2.jsonl", records([0.1] * 300, kind="probe"))
    second = write(tmp_path / "3.jsonl", records([0.4] * 200, number_from=601))
    second.write_bytes(b"not json\n" + second.read_bytes())
    code, events, _, err = run(first, probes, second)
    assert code == 2
    bad, total = err.splitlines()
    assert bad.startswith(f"{second}: line 1: not valid JSON")
    assert total == "1 of 1101 lines or files could not be read"
    opened = events[-1]
    assert opened["event"] == "incident_opened"
    assert opened["interval"][0] <= 902 <= opened["interval"][1]


def test_each_stream_has_its_own_detector(tmp_path: Path) -> None:
    pairs = zip(records([0.7] * 1_000), records([0.4] * 1_000, version="v2", seed=2), strict=True)
    path = write(tmp_path / "r.jsonl", iter([record for pair in pairs for record in pair]))
    _, events, _, _ = run(path)
    assert [(event["event"], event["stream"]["draft_version"]) for event in events] in (
        [("baseline_ready", "v1"), ("baseline_ready", "v2")],
        [("baseline_ready", "v2"), ("baseline_ready", "v1")],
    )


def test_a_refused_field_is_named_with_its_line(tmp_path: Path) -> None:
    good = list(records([0.7] * 3))
    lines = [json.loads(encode_record(record)) for record in good]
    lines[1]["accepted"] = 101
    lines[2]["surprise"] = 1
    path = tmp_path / "r.jsonl"
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    code, _, _, err = run(path)
    assert code == 2
    assert f"{path}: line 3: accepted: 101 is more than drafted (100)" in err
    assert f"{path}: line 5: surprise: unknown field" in err


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    code, events, _, err = run(tmp_path / "none.jsonl")
    assert (code, events) == (2, [])
    assert f"{tmp_path / 'none.jsonl'}: cannot be read (No such file or directory)" in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["none.jsonl"], ["none.jsonl: cannot be read (No such file or directory)"]),
        (
            ["--format", "prometheus", "bad.json"],
            ["bad.json: not an answer of Prometheus' /api/v1/query_range: too many"],
        ),
        (
            ["--format", "prometheus", "value.json", "latin.json"],
            [
                f"value.json: {NOT_AN_ANSWER}: could not convert string to float: 'x'",
                f"latin.json: {NOT_AN_ANSWER}: {why_unreadable(LATIN)}",
            ],
        ),
        (
            ["--format", "vllm-log", "garbled.log"],
            [
                "garbled.log: line 1: cannot be read (minute must be in 0..59)",
                "garbled.log: line 2: cannot be read (could not convert string to float: '10.0.0.1')",
                "2 of 3 lines or files could not be read",
            ],
        ),
        (
            ["--format", "sglang-log", "--num-speculative-tokens", "4", "garbled.log"],
            [
                "garbled.log: line 4: cannot be read (day is out of range for month)",
                "1 of 4 lines or files could not be read",
            ],
        ),
        (
            ["far.jsonl"],
            [
                "far.jsonl: line 1: ended_at: 9999-12-31T23:30:00-01:00 is after the year 9999 in UTC",
                "1 of 2 lines or files could not be read",
            ],
        ),
        (
            ["server.log"],
            [
                "server.log: line 1: not valid JSON (JSON is malformed: invalid character (byte 0))",
                "1 of 1 lines or files could not be read",
                "the log of a server is read with --format vllm-log or --format sglang-log",
            ],
        ),
    ],
)
def test_each_problem_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text('{"status": "error", "error": "too many"}')
    (tmp_path / "server.log").write_text("INFO 11-25 engine started\n")
    series = {"metric": {"__name__": "vllm:spec_decode_num_drafts_total"}, "values": [[1.0, "x"]]}
    answer = {"status": "success", "data": {"resultType": "matrix", "result": [series]}}
    (tmp_path / "value.json").write_text(json.dumps(answer))
    (tmp_path / "latin.json").write_bytes(LATIN)
    told_by_vllm = (
        "SpecDecoding metrics: Mean acceptance length: 2.00, Accepted: 10 tokens, Drafted: 10 tokens"
    )
    (tmp_path / "garbled.log").write_text(
        f"INFO 11-25 10:61:61 {told_by_vllm}\nINFO 11-25 10:00:10 {told_by_vllm}, Peer: 10.0.0.1\n"
        f"INFO 11-25 10:00:20 {told_by_vllm}\n"
        "[2026-02-30 10:00:00] Decode batch, #running-req: 2, accept len: 2.00\n"
    )
    [record] = records([0.7])
    far = datetime(9999, 12, 31, 23, 30, tzinfo=timezone(timedelta(hours=-1)))
    write(tmp_path / "far.jsonl", iter([structs.replace(record, ended_at=far), record]))
    result = CliRunner().invoke(app, ["replay", *arguments])
    assert result.exit_code == 2
    assert result.stderr.splitlines() == told


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "r.jsonl", records([0.7] * 600))

    class Input:
        buffer = io.BytesIO(path.read_bytes())

    monkeypatch.setattr(sys, "stdin", Input)
    assert run(Path("-"))[1] == run(path)[1] != []


def test_text_for_a_terminal_ends_with_a_summary(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", records([0.7] * 1_500 + [0.4] * 100), records([0.5] * 9, version="v2"))
    code, _, out, _ = run(path, as_json=False)
    assert code == 0
    assert "acceptance fell since record 1" in out
    assert "1609 records, 0 of them probes, 2 streams" in out
    assert "s1 big with small (v1, draft_model): degraded" in out
    assert "at least 91 more requests needed" in out
    assert "sessions: not given; only neighbouring requests are treated as correlated" in out
    assert re.search(
        r"expected delay: a drop of 0\.05: about \d+ requests \([\d.]+ min\); a drop of 0\.10", out
    )


def test_requests_that_depend_on_each_other_are_told(tmp_path: Path) -> None:
    """Conversations of ten requests that nothing names, one after the other."""
    own = np.random.default_rng(5).normal(0.65, 0.1, 400).clip(0.2, 0.95)
    path = write(tmp_path / "r.jsonl", records(np.repeat(own, 10).tolist()))
    assert run(path)[1][0]["variance_inflation"] > 2.0
    out = run(path, as_json=False)[2]
    assert re.search(r"not independent: \d+\.\d times the variance", out)


def test_text_says_why_a_baseline_begins(tmp_path: Path) -> None:
    before = (structs.replace(one, num_speculative_tokens=3) for one in records([0.7] * 800))
    after = (
        structs.replace(one, num_speculative_tokens=5, session=f"s{number}")
        for number, one in enumerate(records([0.6] * 900, number_from=801, seed=2))
    )
    later = (
        structs.replace(one, num_speculative_tokens=7)
        for one in records([0.5] * 100, number_from=1_701, seed=3)
    )
    path = write(tmp_path / "r.jsonl", before, after, later)
    _, _, out, _ = run(path, as_json=False)
    assert "first baseline of the segment (request, num_speculative_tokens 3," in out
    assert "num_speculative_tokens changed from 3 to 5 (request, num_speculative_tokens 5," in out
    assert "sessions: in part; of the others only neighbouring requests are treated as correlated" in out
    assert "not watched: request, num_speculative_tokens 7" in out
    assert "num_speculative_tokens changed from 5 to 7" in out


def test_the_false_alarm_setting_is_used_and_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", records([0.7] * 1_500 + [0.5] * 300))
    quick, slow = run(path, every=1_000.0)[1], run(path, every=1e9)[1]
    assert quick[1]["record"] < slow[1]["record"]
    assert slow[1]["false_alarm_every"] == 1e9
    with pytest.raises(BadSettings, match="false_alarm_every"):
        run(path, every=0.0)
