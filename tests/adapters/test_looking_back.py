"""Looking back before anything is installed: logs, and what a Prometheus kept."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driftguard.adapters import ReplayFormat, prometheus_history, sglang_log, vllm_log
from driftguard.adapters.window import Identity, Window
from driftguard.cli.replay import run_replay
from driftguard.records import RecordError
from tests.adapters.fake_engines import MODEL, FakeVllm, K

NOW = datetime(2026, 11, 22, tzinfo=UTC)
SEED = 3
WINDOWS, CHANGE_AT, STEPS = 60, 40, 2_400


def of_vllm(lines: list[str], now: datetime) -> list[tuple[int, Window]]:
    return only_windows(vllm_log.windows(lines, now))


def of_sglang(lines: list[str], k: int | None) -> list[tuple[int, Window]]:
    return only_windows(sglang_log.windows(lines, k))


def only_windows(found: Iterator[tuple[int, Window | RecordError]]) -> list[tuple[int, Window]]:
    return [(number, each) for number, each in found if isinstance(each, Window)]


def vllm_line(at: datetime, accepted: list[int], steps: int) -> str:
    total, k = sum(accepted), len(accepted)
    rates = ", ".join(f"{count / steps:.3f}" for count in accepted)
    return (
        f"(APIServer pid=1) INFO {at:%m-%d %H:%M:%S} [metrics.py:125] SpecDecoding metrics: "
        f"Mean acceptance length: {1 + total / steps:.2f}, Accepted throughput: {total / 10:.2f} tokens/s, "
        f"Drafted throughput: {steps * k / 10:.2f} tokens/s, Accepted: {total} tokens, "
        f"Drafted: {steps * k} tokens, Per-position acceptance rate: {rates}, "
        f"Avg Draft acceptance rate: {100 * total / steps / k:.1f}%\n"
    )


def sglang_line(at: datetime, running: int, length: float, rate: float, rank: str = " TP0") -> str:
    return (
        f"[{at:%Y-%m-%d %H:%M:%S}{rank}] Decode batch, #running-req: {running}, #token: 240768, "
        f"token usage: 0.39, accept len: {length:.2f}, accept rate: {rate:.2f}, cuda graph: True, "
        "gen throughput (token/s): 391.94, #queue-req: 0\n"
    )


def drifting() -> list[tuple[datetime, list[int]]]:
    """(time, accepted by position) of windows of STEPS steps: chains of K, .8 each, then .6."""
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    found = []
    for number in range(WINDOWS):
        kept = np.cumprod(rng.random((STEPS, K)) < (0.8 if number < CHANGE_AT else 0.6), axis=1)
        found.append(
            (datetime(2026, 6, 1, tzinfo=UTC) + timedelta(seconds=10 * number), kept.sum(axis=0).tolist())
        )
    return found


def replayed(path: Path, kind: ReplayFormat, **known: Any) -> tuple[int, list[Any], str]:
    out, err = io.StringIO(), io.StringIO()
    code = run_replay(
        [path],
        json=True,
        false_alarm_every=100_000,
        minimum_drop=0.05,
        out=out,
        err=err,
        format=kind,
        known=Identity(known.pop("server", ""), **known),
    )
    return code, [json.loads(line) for line in out.getvalue().splitlines()], err.getvalue()


def incident(events: list[Any]) -> Any:
    (found,) = [event for event in events if event["event"] == "incident_opened"]
    return found


def test_a_line_of_vllm_tells_the_counts_it_was_made_of() -> None:
    line = vllm_line(datetime(2000, 9, 4, 11, 1, 16), [44, 44, 44, 44, 35, 27, 18], 44)
    ((number, window),) = of_vllm(["something else", line], NOW)
    assert (number, window.steps, window.drafted, window.accepted) == (2, 44, 308, 256)
    assert window.num_speculative_tokens == 7
    assert window.ended_at == datetime(2026, 9, 4, 11, 1, 16, tzinfo=UTC)
    assert window.ended_at - window.begun_at == timedelta(seconds=10)


def test_steps_of_drafts_that_were_not_full_come_from_the_length() -> None:
    line = vllm_line(datetime(2000, 9, 4), [100, 50, 20], 125).replace("Drafted: 375", "Drafted: 301")
    ((_, window),) = of_vllm([line], NOW)
    assert window.steps == pytest.approx(125, abs=1)


def test_a_log_of_december_is_of_last_year() -> None:
    ((_, window),) = of_vllm([vllm_line(datetime(2000, 12, 31), [3], 5)], NOW)
    assert window.ended_at.year == 2025


def test_local_times_ahead_of_utc_are_of_this_year() -> None:
    for latest, at, year in (
        (NOW, NOW.replace(tzinfo=None) + timedelta(hours=9), NOW.year),
        (datetime(2026, 12, 31, 20, tzinfo=UTC), datetime(2000, 1, 1, 5), 2027),
        (datetime(2026, 3, 1, tzinfo=UTC), datetime(2000, 2, 29), 2024),
    ):
        line = vllm_line(at.replace(year=2000), [3], 5)
        ((_, window),) = of_vllm([line], latest)
        assert window.ended_at.replace(tzinfo=None) == at.replace(year=year)


def test_sglang_wants_to_be_told_k_and_says_what_it_looks_like() -> None:
    line = sglang_line(NOW, 2, 5.06, 0.81)
    with pytest.raises(ValueError, match=r"--num-speculative-tokens .* \(this line suggests 5\)"):
        list(of_sglang([line], None))
    lines = [
        line,
        sglang_line(NOW, 2, 5.06, 0.81, " TP1"),
        sglang_line(NOW + timedelta(seconds=9), 2, 3.0, 0.4),
    ]
    found = list(of_sglang(lines, 5))
    assert [(number, window.steps, window.drafted, window.accepted) for number, window in found] == [
        (1, 80, 400, 325),
        (3, 80, 400, 160),
    ]
    assert found[1][1].begun_at == found[0][1].ended_at == NOW
    assert found[1][1].fidelity == "gauge"


@pytest.mark.parametrize("kind", ["vllm-log", "sglang-log"])
def test_a_drift_in_a_log_is_found_and_names_the_line(tmp_path: Path, kind: ReplayFormat) -> None:
    path = tmp_path / "chat-eu-1.log"
    lines = []
    for at, accepted in drifting():
        lines.append(f"INFO {at:%m-%d %H:%M:%S} [loggers.py:127] Engine 000: Running: 3 reqs\n")
        length, rate = 1 + sum(accepted) / STEPS, sum(accepted) / STEPS / K
        lines.append(
            vllm_line(at, accepted, STEPS)
            if kind == "vllm-log"
            else sglang_line(at, STEPS // sglang_log.PASSES, length, rate)
        )
    path.write_text("".join(lines))
    code, events, err = replayed(path, kind, num_speculative_tokens=K)
    found = incident(events)
    assert (code, err) == (0, "")
    assert found["stream"]["server"] == "chat-eu-1"
    assert found["direction"] == "down"
    assert abs(found["change_point"] - 2 * (CHANGE_AT + 1)) <= 4


def history(instances: list[str]) -> dict[str, Any]:
    """As /api/v1/query_range answers it, from scrapes of a vLLM."""
    engine = FakeVllm()
    series: dict[str, dict[str, Any]] = {}
    for number, (at, accepted) in enumerate([(datetime(2026, 5, 31, tzinfo=UTC), [0] * K), *drifting()]):
        engine.steps += STEPS * (number > 0)
        engine.requests += 3
        for place, count in enumerate(accepted):
            engine.drafted[place] += STEPS * (number > 0)
            engine.accepted[place] += count
        for line in engine.text().splitlines():
            name, _, value = line.rpartition(" ")
            series.setdefault(name, {"values": []})["values"].append((at.timestamp(), value))
    result = []
    for instance in instances:
        for name, values in series.items():
            base, _, labels = name.partition("{")
            pairs = dict(pair.split("=") for pair in labels.rstrip("}").split(",") if pair)
            metric = {key: value.strip('"') for key, value in pairs.items()}
            result.append(
                {"metric": {"__name__": base, "instance": instance, "job": "vllm", **metric}, **values}
            )
    return {"status": "success", "data": {"resultType": "matrix", "result": result}}


def test_a_drift_in_what_a_prometheus_kept_is_found_in_each_instance(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    path.write_text(json.dumps(history(["a:8000", "b:8000"])))
    code, events, err = replayed(path, "prometheus")
    assert (code, err) == (0, "")
    found = {event["stream"]["server"]: event for event in events if event["event"] == "incident_opened"}
    assert sorted(found) == ["a:8000", "b:8000"]
    assert {event["stream"]["target"] for event in found.values()} == {MODEL}
    assert all(event["direction"] == "down" for event in found.values())


def test_counters_that_a_prometheus_lacks_for_a_while_count_on_from_there() -> None:
    """As of one of several engines behind an address."""
    name = "vllm:spec_decode_num_draft_tokens_total"

    def series(engine: str, counted: dict[int, int]) -> dict[str, Any]:
        metric = {"__name__": name, "instance": "a", "model_name": MODEL, "engine": engine}
        return {"metric": metric, "values": [(at, str(count)) for at, count in counted.items()]}

    kept = [series("0", {0: 500, 30: 520, 60: 540}), series("1", {0: 900, 60: 940})]
    text = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": kept}})
    found = [window for _, window in prometheus_history.windows(text.encode(), Identity("chat"))]
    assert [window.drafted for window in found] == [20, 20 + 40]


def test_what_a_prometheus_kept_as_no_number_is_left_out(tmp_path: Path) -> None:
    kept = history(["a:8000"])
    for series in kept["data"]["result"]:
        if series["metric"]["__name__"] == "vllm:num_requests_running":
            series["values"][5] = (series["values"][5][0], "NaN")
    path = tmp_path / "history.json"
    path.write_text(json.dumps(kept))
    code, events, err = replayed(path, "prometheus")
    assert (code, err) == (0, "")
    assert incident(events)["direction"] == "down"


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("vllm-log", "INFO nothing of the kind\n", "--disable-log-stats"),
        ("sglang-log", "", "SGLang writes none without speculation"),
        ("prometheus", "{}", "not an answer of Prometheus"),
        ("prometheus", '{"status": "error", "error": "query timed out"}', "query timed out"),
        ("prometheus", json.dumps(history([])), "no counter of a serving engine"),
    ],
)
def test_a_file_that_tells_nothing_is_named_with_the_reason(
    tmp_path: Path,
    kind: ReplayFormat,
    text: str,
    told: str,
) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    code, events, err = replayed(path, kind)
    assert (code, events) == (2, [])
    assert str(path) in err
    assert told in err
