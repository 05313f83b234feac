"""What the detector says about traces of real engines that nobody here made.

The traces hold 80 to 240 requests per kind of traffic, too few for a reference period. Requests are
therefore drawn from them with replacement (seeds fixed): their counts and spread are real, their order
and number are not.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driftguard.detection import (
    DriftOpened,
    Finding,
    ObservationBatch,
    StreamState,
    accept_new_normal,
    describe,
    fold,
)
from driftguard.detection.config import DetectorConfig
from tests.detection.traffic import START, fold_all

TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
FUTURE_OUTLIER = TRACES / "futureoutlier_qwen3_4b_t0.jsonl"
SPEC_BENCH = TRACES / "specbench_BNukhkadiev_vicuna7b.jsonl"
LIVE_WINDOWS = TRACES / "vllm_live_windows_labelled.jsonl"
SPEC_BENCH_RUN = "vicuna-7b-v1.3-sps-68m-float16-temp-0.0"
SPEC_BENCH_TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")  # the rest is MT-bench
POSITIONS = 5

pytestmark = pytest.mark.skipif(
    not TRACES.is_dir(), reason=f"needs the real traces in {TRACES}, which are not part of the repository"
)


@dataclass(frozen=True, slots=True)
class Request:
    segment: str
    drafted: int
    accepted: int


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def future_outlier(run: str) -> list[Request]:
    """96 prompts of three data sets, answered by Qwen3-4B with one kind of draft."""
    return [
        Request(row["dataset"], row["drafted"], row["accepted"])
        for row in lines(FUTURE_OUTLIER)
        if row["run"] == run
    ]


def spec_bench() -> dict[str, list[Request]]:
    """480 requests, 80 of each of six tasks, with a small draft model.

    The trace does not say how many tokens each round drafted (the number adapted). The first five
    positions of every round are counted: accepted are the tokens kept there.
    """
    tasks: dict[str, list[Request]] = {}
    for row in lines(SPEC_BENCH):
        if (row["run"], row["dataset"]) == (SPEC_BENCH_RUN, "spec_bench"):
            task = row["category"] if row["category"] in SPEC_BENCH_TASKS else "mt_bench"
            kept = sum(min(accepted, POSITIONS) for accepted in row["acc_seq"])
            tasks.setdefault(task, []).append(Request(task, POSITIONS * row["rounds"], kept))
    return tasks


def drawn(rng: np.random.Generator, requests: Sequence[Request], n: int) -> list[Request]:
    """n of the requests with replacement."""
    return [requests[place] for place in rng.integers(0, len(requests), n)]


def batch_of(requests: Sequence[Request]) -> ObservationBatch:
    return ObservationBatch.of(
        range(1, len(requests) + 1),
        [request.segment for request in requests],
        [request.drafted for request in requests],
        [request.accepted for request in requests],
        [START + second for second in range(len(requests))],
    )


def opened(findings: list[Finding]) -> list[DriftOpened]:
    return [finding for finding in findings if isinstance(finding, DriftOpened)]


@pytest.mark.parametrize("draft", ["dflash", "dspark"])
@pytest.mark.parametrize("stale", ["gap", "self_kv"])
def test_a_draft_with_stale_features_is_found(draft: str, stale: str) -> None:
    fresh, worse = (future_outlier(f"s1t0_{draft}_{kind}") for kind in ("fresh", stale))
    delays, held, apart = [], 0, 0
    for seed in range(5):
        rng = np.random.default_rng(seed)
        steady, begun = drawn(rng, fresh, 6_000), 6_001
        (found,) = opened(fold_all(batch_of(steady + drawn(rng, worse, 100)))[1])
        assert found.direction == "down"
        assert found.ordinal >= begun
        assert found.after.rate < found.before.low
        assert "gsm8k" in {change.segment for change in found.segments}
        delays.append(found.ordinal - begun + 1)
        held += found.interval[0] <= begun <= found.interval[1]
        apart += found.after.high < found.before.low
    assert max(delays) <= 30
    assert held >= 4
    assert apart >= 4  # an alarm after eight requests has a wide interval


@pytest.mark.parametrize("draft", ["dflash", "dspark"])
def test_a_fresh_draft_is_left_alone(draft: str) -> None:
    requests = drawn(np.random.default_rng(5), future_outlier(f"s1t0_{draft}_fresh"), 30_000)
    state, findings = fold_all(batch_of(requests))
    assert opened(findings) == []
    assert describe(DetectorConfig(), state).verdict == "steady"


def test_shuffled_tasks_raise_no_alarm() -> None:
    everything = [request for requests in spec_bench().values() for request in requests]
    state, findings = fold_all(batch_of(drawn(np.random.default_rng(6), everything, 60_000)))
    assert opened(findings) == []
    assert {segment.verdict for segment in describe(DetectorConfig(), state).segments} == {"steady"}


def test_task_after_task_raises_no_alarm_although_the_aggregate_moves() -> None:
    """Only the mix moves: every task is steady."""
    rng, tasks = np.random.default_rng(7), spec_bench()
    blocks = [drawn(rng, tasks[name], 2_000) for _ in range(4) for name in sorted(tasks)]
    rates = [sum(item.accepted for item in block) / sum(item.drafted for item in block) for block in blocks]
    assert max(rates) - min(rates) > 0.1
    state, findings = fold_all(batch_of([request for block in blocks for request in block]))
    assert opened(findings) == []
    assert {segment.verdict for segment in describe(DetectorConfig(), state).segments} == {"steady"}


def live_servers() -> list[list[dict[str, Any]]]:
    """Windows of 10 seconds of each of two live servers, in order."""
    servers: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in lines(LIVE_WINDOWS):
        servers[row["file"]].append(row)
    return list(servers.values())


@pytest.mark.parametrize("server", [0, 1])
def test_live_windows_tell_every_change_of_workload_and_none_of_concurrency(server: int) -> None:
    """Each change is accepted as the new normal as soon as it is found, as its operator would."""
    rows = live_servers()[server]
    workloads = [row["workload"] for row in rows]
    changes = [place for place in range(1, len(rows)) if workloads[place] != workloads[place - 1]]
    state, found = StreamState(), []
    for place, row in enumerate(rows):
        ended = datetime.fromisoformat(row["ts"]).replace(tzinfo=UTC).timestamp()
        window = ObservationBatch.of(
            [place],
            ["default"],
            [row["drafted"]],
            [row["accepted"]],
            [ended],
            kind=["window"],
            started_at=[ended - 10.0],
        )
        state, findings = fold(DetectorConfig(), state, window)
        for finding in opened(findings):
            found.append(finding)
            state = accept_new_normal(state, finding.direction)
    assert [finding.direction for finding in found] == ["up", "down"]
    delays = [finding.ordinal - change for finding, change in zip(found, changes, strict=True)]
    assert max(delays) <= 6
    assert all(
        finding.interval[0] <= change + 1 and change - 1 <= finding.interval[1]  # labels are good to that
        for finding, change in zip(found, changes, strict=True)
    )
