"""The proxy and the sidecar beside one real vLLM for all tests of this file: it takes a minute to start."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from driftguard_training.corpus import prompts

from tests.alerting.http_receiver import wait_until
from tests.live import clients, predicted
from tests.live.install import ARCTIC
from tests.live.processes import of_all, proxy, sidecar, wire
from tests.live.scraped import (
    assert_a_kill_loses_nothing,
    assert_it_may_stay_away,
    assert_windows_are_of_the_draft_of_each_life,
    condition,
    is_scraped,
    scraping,
    windows_are,
)
from tests.live.servers import (
    DRAFT,
    TARGET,
    Engine,
    K,
    in_bentoml,
    needs_bentoml,
    needs_suffix,
    needs_vllm,
    running,
    speculative_config,
    vllm_server,
)

pytestmark = [needs_vllm, pytest.mark.live, pytest.mark.timeout(900)]

RECORDED = [clients.completion, clients.streamed_completion, clients.chat, clients.streamed_chat]


def own_counts(engine: Engine) -> dict[str, int]:
    counters = engine.counters()
    names = {
        "steps": "num_drafts_total",
        "drafted": "num_draft_tokens_total",
        "accepted": "num_accepted_tokens_total",
        **{f"accepted@{place}": f"num_accepted_tokens_per_pos_total@{place}" for place in range(K)},
    }
    return {ours: int(counters[f"vllm:spec_decode_{theirs}"]) for ours, theirs in names.items()}


def since(engine: Engine, before: dict[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in own_counts(engine).items()}


def test_records_of_a_mix_of_requests_add_up_to_its_own_counters(
    vllm: Engine, database_url: str, tmp_path: Path
) -> None:
    before = own_counts(vllm)
    with sidecar(tmp_path / "sidecar", database_url) as beside:
        with proxy(tmp_path, vllm.url, beside.url, "--draft", "small", "--method", "draft_model") as through:
            clients.all_of(RECORDED, through.url, 60, seed=1)
            through.wait_sent(60)
        records, own = beside.records(), since(vllm, before)
    ours = of_all(records)
    print(f"ours {ours}, its own {own}")
    # How many is chance: its CPU backend verifies at temperatures that were never set (docs/sources.md).
    assert all(own.values())
    assert {name: ours[name] for name in own} == own
    assert {(record.target, record.num_speculative_tokens) for record in records} == {(clients.MODEL, K)}
    rules = {(record.temperature, record.acceptance_rule) for record in records}
    assert rules == {(0.0, "greedy"), (1.0, "unknown")}  # its answers do not tell
    assert all(record.time_to_first_token_seconds is not None for record in records)


def test_its_acceptance_is_predicted_from_what_it_generated(vllm: Engine, tmp_path: Path) -> None:
    """As the gate predicts it. What is left open at temperature 0 is the end of an answer: vLLM drafts K
    tokens there too, and counts those that it accepts behind the longest length, which no answer shows."""
    assert_acceptance_is_predicted(vllm, 0.0, tmp_path, within=0.02)


def test_its_acceptance_is_predicted_at_temperature_1(tmp_path: Path) -> None:
    """With its own way of verifying sampled answers, which a fault of it hides on a CPU: `mended_vllm`."""
    engine = vllm_server(tmp_path, speculative_config(DRAFT))
    mended = Path(__file__).parent / "mended_vllm"
    engine.environment = {**engine.environment, "PYTHONPATH": str(mended)}
    with running(engine):
        assert_acceptance_is_predicted(engine, 1.0, tmp_path, within=0.03)


def assert_acceptance_is_predicted(
    engine: Engine, temperature: float, directory: Path, *, within: float
) -> None:
    before = own_counts(engine)
    served = [
        clients.with_token_ids_of_vllm(engine.url, text, "headers", temperature=temperature)
        for text in prompts("headers", 120, seed=5, characters=clients.CHARACTERS)
    ]
    own = since(engine, before)
    live = own["accepted"] / own["drafted"]
    expected = predicted.acceptance(served, DRAFT, temperature, directory)
    print(f"temperature {temperature}: predicted {expected:.4f}, live {live:.4f}")
    assert own["accepted@1"] > 0  # with the fault there are none
    assert abs(expected - live) < within


def test_every_byte_of_an_answer_passes_unchanged_but_for_the_usage_that_was_not_asked_for(
    vllm: Engine, database_url: str, tmp_path: Path
) -> None:
    with (
        sidecar(tmp_path / "sidecar", database_url) as beside,
        wire(vllm.url) as behind,
        proxy(tmp_path, behind.url, beside.url) as through,
        wire(through.url) as before,
    ):
        for number, ask in enumerate(RECORDED):
            ask(before.url, "def f(x):\n    return", random.Random(number))
        through.wait_sent(len(RECORDED))
    passed = before.bodies()
    answered = [body for body in behind.bodies() if b'"choices"' in body]
    assert len(passed) == len(answered) == len(RECORDED)
    for theirs, ours in zip(answered, passed, strict=True):
        if theirs == ours:
            continue
        kept = ours.split(b"\n\n")
        *_, removed = [event for event in theirs.split(b"\n\n") if event not in kept]
        usage = json.loads(removed.removeprefix(b"data: "))
        assert usage["choices"] == []
        # Where no usage is asked for, its fingerprint is told by the event before.
        fingerprint = b',"system_fingerprint":' + json.dumps(usage["system_fingerprint"]).encode()
        assert ours.count(fingerprint + b"}\n\ndata: [DONE]") == 1
        ours = ours.replace(fingerprint, b"")
        assert theirs == ours.replace(b"data: [DONE]", removed + b"\n\ndata: [DONE]")


def test_what_it_does_not_tell_is_counted_with_the_reason(
    vllm: Engine, database_url: str, tmp_path: Path
) -> None:
    """Several answers, a client that goes away, a stop string, and the two newer interfaces."""
    rng = random.Random(3)
    with sidecar(tmp_path / "sidecar", database_url) as beside:
        with proxy(tmp_path, vllm.url, beside.url) as through:
            clients.two_completions(through.url, "import os\n", rng)
            clients.abandoned(through.url, "def f(x):\n    return", rng)
            clients.stopped_completion(through.url, "import os\n", random.Random(4))
            clients.response(through.url, "import os\n", rng)
            clients.message(through.url, "import os\n", rng)
            wait_until(lambda: through.counts()["failed"] == 1, "the request that was given up")
            counts = through.counts()
            print(counts)
            assert counts["several_answers"] == 1
            assert counts["stop_string"] == 1
            assert counts["no_numbers"] == 2
            assert counts["records_sent"] == 0
        assert beside.records() == []


def test_the_status_tells_which_share_ends_on_stop_strings(
    vllm: Engine, database_url: str, tmp_path: Path
) -> None:
    kinds = [*RECORDED, clients.stopped_completion, clients.streamed_stopped_completion]
    with sidecar(tmp_path / "sidecar", database_url) as beside:
        with proxy(tmp_path, vllm.url, beside.url, "--server", "real", "--method", "draft_model") as through:
            answers = clients.all_of(kinds, through.url, 120, seed=5)
            stopped = sum(clients.ended_on_stop_string(answer) for answer in answers)
            through.wait_sent(120 - stopped)
        status = beside.get("status")
        (missing,), (stream,) = status["unrecorded"], status["streams"]
    print(stream["text"])
    assert 30 <= stopped <= 40
    assert (missing["server"], missing["recorded"]) == ("real", 120 - stopped)
    assert missing["reasons"] == {"stop_string": stopped}
    assert f"{stopped / 120:.0%} of the 120 requests to real" in stream["text"]


def test_windows_add_up_to_its_own_counters_though_it_is_killed(
    vllm: Engine, database_url: str, tmp_path: Path
) -> None:
    assert_a_kill_loses_nothing(
        vllm, own_counts, [*RECORDED, clients.stopped_completion], tmp_path / "sidecar", database_url
    )


def test_a_server_that_stays_away_is_unreachable_and_its_stream_becomes_stale_until_it_is_back(
    vllm: Engine, database_url: str, tmp_path: Path
) -> None:
    assert_it_may_stay_away(vllm, [clients.completion], tmp_path / "sidecar", database_url)


def test_one_whose_engine_hangs_behind_its_api_is_stalled_until_it_goes_on(
    vllm: Engine, database_url: str, tmp_path: Path
) -> None:
    engine_core = process_of(vllm, "EngineCore")
    with (
        sidecar(tmp_path / "sidecar", database_url, scraping(vllm.url)) as beside,
        ThreadPoolExecutor(8) as pool,
    ):
        wait_until(lambda: is_scraped(beside), "the first scrape")
        long: dict[str, Any] = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}
        waiting = [
            pool.submit(clients.completion, vllm.url, "import os\n", random.Random(seed), **long)
            for seed in range(8)
        ]
        wait_until(lambda: vllm.counters()["vllm:num_requests_running"] > 0, "a running request")
        os.kill(engine_core, signal.SIGSTOP)
        try:
            wait_until(lambda: condition(beside) == "stalled", "the condition of an engine that hangs")
            (source,) = beside.get("status")["sources"]
            print(source["detail"])
        finally:
            os.kill(engine_core, signal.SIGCONT)
        wait_until(lambda: condition(beside) in ("reporting", "idle"), "tokens")
        assert all(request.result().usage.completion_tokens == 900 for request in waiting)


def process_of(engine: Engine, name: str) -> int:
    assert engine.process is not None
    listed = subprocess.run(["ps", "-eo", "pid=,pgid=,args="], capture_output=True, check=True, text=True)
    every = (line.split(maxsplit=2) for line in listed.stdout.splitlines())
    (found,) = (int(pid) for pid, group, args in every if int(group) == engine.process.pid and name in args)
    return found


def test_windows_are_of_the_draft_that_each_life_was_started_with(database_url: str, tmp_path: Path) -> None:
    """Another draft is announced, and comes with the next start: here the target itself, which keeps all."""
    vllm = vllm_server(tmp_path, speculative_config(DRAFT))
    other = [
        speculative_config(TARGET) if part == speculative_config(DRAFT) else part for part in vllm.command
    ]
    assert_windows_are_of_the_draft_of_each_life(vllm, other, own_counts, tmp_path, database_url)


@pytest.fixture(scope="module")
def eagle3_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    head = tmp_path_factory.mktemp("eagle3") / "head"
    subprocess.run([sys.executable, "-m", "tests.live.eagle3_head", str(TARGET), str(head)], check=True)
    return head


@pytest.mark.parametrize("method", ["ngram", pytest.param("suffix", marks=needs_suffix), "eagle3"])
def test_other_methods_are_counted_alike(
    method: str, database_url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    more: dict[str, Any] = {"prompt_lookup_max": 4} if method == "ngram" else {}
    if method == "eagle3":
        more = {"model": str(request.getfixturevalue("eagle3_head"))}
    engine = vllm_server(tmp_path, json.dumps({"method": method, "num_speculative_tokens": K, **more}))
    engine.environment = {**engine.environment, "PYTHONPATH": str(ARCTIC)}
    with (
        running(engine) as vllm,
        sidecar(tmp_path / "sidecar", database_url) as beside,
        proxy(tmp_path, vllm.url, beside.url, "--method", method) as through,
    ):
        clients.all_of([clients.greedy_completion], through.url, 40, seed=12)
        through.wait_sent(40)
        ours, own = of_all(beside.records()), own_counts(vllm)
    print(f"ours {ours}, its own {own}")
    assert own["accepted"] > 0
    assert {name: ours[name] for name in own} == own


@needs_bentoml
def test_windows_of_a_vllm_in_bentoml_add_up_to_its_own_counters(database_url: str, tmp_path: Path) -> None:
    """BentoML 1.4 hands its directory of metrics to its vLLM, whose series then stand twice in `/metrics`."""
    inside = vllm_server(tmp_path, speculative_config(DRAFT))
    with (
        running(in_bentoml(inside, tmp_path)) as bentoml,
        sidecar(tmp_path / "sidecar", database_url, scraping(bentoml.url)) as beside,
    ):
        wait_until(lambda: is_scraped(beside), "the first scrape")
        clients.all_of(RECORDED, bentoml.url, 40, seed=13)
        own, twice = own_counts(inside), own_counts(bentoml)
        wait_until(lambda: windows_are(beside, own), f"windows of {own}")
        (source,) = beside.get("status")["sources"]
    print(f"ours and its own {own}, in BentoML's answer {twice}")
    assert own["accepted"] > 20
    assert source["kind"] == "bentoml"
