"""The plugin inside a real vLLM: its records beside the counters of vLLM's own /metrics."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from driftguard.retraining.engines.live_update import NotOffered
from driftguard.retraining.engines.vllm_update import VllmUpdate
from tests.alerting.http_receiver import wait_until
from tests.live import clients
from tests.live.processes import Sidecar, of_all, sidecar
from tests.live.servers import (
    DRAFT,
    Engine,
    needs_vllm,
    running,
    speculative_config,
    vllm_server,
    with_plugin,
)
from tests.live.test_vllm_live_update import order
from tests.live.test_vllm_server import own_counts, since

pytestmark = [needs_vllm, pytest.mark.live, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def beside(module_database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    config = "[capture]\nenabled = true\n"
    with sidecar(tmp_path_factory.mktemp("sidecar"), module_database_url, config) as found:
        yield found


@pytest.fixture(scope="module")
def vllm(beside: Sidecar, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = vllm_server(tmp_path_factory.mktemp("vllm"), speculative_config(DRAFT))
    with running(with_plugin(engine, beside.url)):
        yield engine


def test_its_sums_are_those_of_vllm_with_stop_strings_aborts_and_several_answers(
    vllm: Engine, beside: Sidecar
) -> None:
    before, rng = own_counts(vllm), random.Random(2)
    asks = [
        clients.completion,
        clients.streamed_completion,
        clients.chat,
        clients.stopped_completion,
        clients.abandoned,
        clients.two_completions,
    ]
    clients.all_of(asks, vllm.url, 60, seed=1)
    clients.response(vllm.url, "import os\n", rng)
    clients.message(vllm.url, "import os\n", rng)
    sequences = 60 + 10 + 2  # ten requests have two
    wait_until(lambda: len(beside.records()) == sequences, f"{sequences} records")
    records, own = beside.records(), since(vllm, before)
    ours = of_all(records)
    print(f"ours {ours}, its own {own}")
    assert own["accepted"] > 20
    assert {name: ours[name] for name in own} == own
    (first, *_) = records
    assert (first.server, first.target, first.draft, first.draft_version, first.method) == (
        *("real", clients.MODEL, DRAFT.name, "v1", "draft_model"),
    )
    assert {record.acceptance_rule for record in records} == {"greedy", "rejection"}
    for record in records:
        assert record.time_to_first_token_seconds is not None
        assert record.cached_tokens is not None


def test_a_request_has_the_segment_and_the_session_of_its_headers(vllm: Engine, beside: Sidecar) -> None:
    known = {record.record_id for record in beside.records()}
    asking = clients.client(vllm.url, "support-de")
    asking.completions.create(
        model=clients.MODEL, prompt="x", max_tokens=8, extra_headers={"X-DriftGuard-Session": "s-1"}
    )
    wait_until(lambda: len(beside.records()) == len(known) + 1, "the record")
    (record,) = [one for one in beside.records() if one.record_id not in known]
    assert (record.segment, record.session) == ("support-de", "s-1")
    assert record.output_tokens == 8


def test_token_ids_are_captured_that_the_target_made_of_the_prompt(vllm: Engine, beside: Sidecar) -> None:
    prompt, asked = [5, 6, 7, 8], clients.client(vllm.url, "captured")
    answer = asked.completions.create(
        model=clients.MODEL,
        prompt=prompt,
        max_tokens=12,
        temperature=0.0,
        extra_body={"return_token_ids": True},
    )
    wait_until(lambda: bool(captures(beside, "captured")), "the capture")
    (captured,), told = captures(beside, "captured"), answer.choices[0].model_extra or {}
    assert captured["prompt_token_ids"] == prompt
    assert captured["output_token_ids"] == told["token_ids"]
    assert captured["draft_version"] == "v1"


def captures(beside: Sidecar, segment: str) -> list[dict[str, Any]]:
    answer = beside.client.get("/api/v1/captures", params={"segment": segment})
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_canary_probe_is_recorded_by_its_sender_only(vllm: Engine, beside: Sidecar) -> None:
    for segment in ("driftguard-probe", "after the probe"):
        asking = clients.client(vllm.url, segment)
        asking.completions.create(model=clients.MODEL, prompt="x", max_tokens=8)
    wait_until(lambda: "after the probe" in segments(beside), "the record of the other")
    assert "driftguard-probe" not in segments(beside)


def test_requests_are_answered_while_the_sidecar_is_away(vllm: Engine, beside: Sidecar) -> None:
    beside.process.popen.send_signal(signal.SIGSTOP)
    try:
        asking = clients.client(vllm.url, "sidecar away")
        for _ in range(8):
            asking.completions.create(model=clients.MODEL, prompt="x", max_tokens=8)
    finally:
        beside.process.popen.send_signal(signal.SIGCONT)
    wait_until(lambda: segments(beside)["sidecar away"] == 8, "the records that waited")


def test_without_development_mode_no_draft_is_loaded_live(vllm: Engine) -> None:
    with pytest.raises(NotOffered, match="answered /is_paused with 404"):
        VllmUpdate(vllm.url, None, 60.0).replace(order(DRAFT, "v2", DRAFT, "v1"), None)


def segments(beside: Sidecar) -> Counter[str]:
    return Counter(record.segment for record in beside.records())
