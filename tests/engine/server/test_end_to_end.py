"""The real engine behind the real server, with a tiny random pair."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import openai
import pytest
from driftguard_engine.config import EngineConfig
from driftguard_engine.decode import placement
from driftguard_engine.engine import Engine
from driftguard_engine.telemetry.telemetry import Telemetry
from prometheus_client.parser import text_string_to_metric_families

from driftguard.records import decode_record
from tests.engine.server.conftest import openai_client
from tests.engine.server.serving import PATIENCE_SECONDS, Receiver, served, wait_until


def test_openai_client_completes_and_streams_the_same_text(real_client: httpx.Client) -> None:
    api = openai_client(real_client)
    asked: dict[str, Any] = {"model": "target", "prompt": "def main", "max_tokens": 24, "seed": 5}
    whole = api.completions.create(**asked)
    stream = list(api.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert whole.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in stream[:-1]) == whole.choices[0].text
    assert stream[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert stream[-1].usage == whole.usage


def test_speculation_is_reported_and_can_be_switched_off_per_request(real_client: httpx.Client) -> None:
    asked = {"prompt": "def main", "max_tokens": 24, "ignore_eos": True, "seed": 5}
    on = real_client.post("/v1/completions", json=asked | {"num_speculative_tokens": 3}).json()
    counts = on["metrics"]["speculative_decoding"]
    assert counts["num_spec_tokens"] == 3
    assert 0 < counts["num_draft_tokens"] <= 3 * counts["num_spec_steps"]
    assert sum(counts["acceptance_histogram"]) == counts["num_spec_steps"]
    assert (
        sum(length * steps for length, steps in enumerate(counts["acceptance_histogram"]))
        == counts["num_accepted_draft_tokens"]
    )
    off = real_client.post("/v1/completions", json=asked | {"num_speculative_tokens": 0}).json()
    assert off["metrics"]["speculative_decoding"] is None


def test_chat_answers_with_a_template_and_is_refused_without(models: Path, real_client: httpx.Client) -> None:
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        openai_client(real_client).chat.completions.create(
            model="target", messages=[{"role": "user", "content": "hi"}]
        )
    engine = Engine(EngineConfig(target=str(models / "chat"), drafter="ngram", threads=1))
    with served(engine) as client:
        api = openai_client(client)
        answer = api.chat.completions.create(
            model="chat", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=5, temperature=0
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 5
        too_long = [{"role": "user", "content": "x" * 300}]
        with pytest.raises(openai.BadRequestError, match=r"messages: 3.* tokens") as refused:
            api.chat.completions.create(model="chat", messages=too_long)  # type: ignore[arg-type]
        assert refused.value.param == "messages"


def test_what_the_engine_refuses_names_the_field(real_client: httpx.Client) -> None:
    for body, param in (
        ({"prompt": "x" * 300}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [999_999]}, "prompt"),
        ({"prompt": "x", "num_speculative_tokens": 17}, "num_speculative_tokens"),
    ):
        response = real_client.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert response.json()["error"]["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("directory", "method"),
    [
        ("good", "draft_model"),
        ("head", "eagle3"),
        ("dspark", "dspark"),
        ("heads", "medusa"),
        ("adapter", "streaming"),
    ],
)
def test_a_draft_is_swapped_under_traffic_without_a_failed_request(
    models: Path, real_engine: Engine, directory: str, method: str
) -> None:
    stop = Event()

    def keep_asking(base: httpx.URL, stream: bool) -> list[int]:
        statuses = []
        with httpx.Client(base_url=base, timeout=30) as client:
            while not stop.is_set():
                body = {"prompt": "while", "max_tokens": 12, "ignore_eos": True, "stream": stream}
                response = client.post("/v1/completions", json=body)
                whole = response.text.endswith("[DONE]\n\n") if stream else True
                statuses.append(response.status_code if whole else 0)
        return statuses

    with Receiver() as receiver:
        telemetry = Telemetry(receiver.url, None, "engine", real_engine.target_name)
        with served(real_engine, telemetry) as client, ThreadPoolExecutor(3) as pool:
            askers = [pool.submit(keep_asking, client.base_url, stream) for stream in (True, False, True)]
            before = client.get("/admin/info").json()["draft"]
            wait_until(lambda: len(receiver.stored()) >= 5, "traffic flows on the first draft")
            loaded = client.post(
                "/admin/drafts", json={"directory": str(models / directory), "version": "better"}
            )
            assert loaded.status_code == 201
            assert client.get("/admin/info").json()["draft"] == before
            swapped = client.post("/admin/drafts/better/activate")
            assert swapped.json()["version"] == "better"
            assert client.get("/admin/info").json()["draft"] == swapped.json()
            assert swapped.json()["method"] == method
            wait_until(
                lambda: sum(line["draft_version"] == "better" for line in receiver.stored()) >= 5,
                "traffic flows on the second draft",
            )
            stop.set()
            statuses = [status for asker in askers for status in asker.result()]
            # Before the server stops: what is unsent two seconds later stays in its spool, and here is none.
            wait_until(
                lambda: len({line["record_id"] for line in receiver.stored()}) == len(statuses),
                "a record of every request",
            )
    assert set(statuses) == {200}
    lines = receiver.stored()
    rates = {
        version: sum(line["accepted"] for line in of) / sum(line["drafted"] for line in of)
        for version in (before["version"], "better")
        if (of := [line for line in lines if line["draft_version"] == version])
    }
    assert (rates["better"] == 1.0) == (directory == "good")  # this draft is the target itself
    assert rates[before["version"]] < 0.9
    assert {line["method"] for line in lines if line["draft_version"] == "better"} == {method}
    assert {line["draft_version"] for line in lines} == set(rates)
    for batch in receiver.batches:
        for line in batch.lines:
            decode_record(json.dumps(line))


def test_speculation_is_switched_off_globally_and_leaves_records_without_a_draft(real_engine: Engine) -> None:
    with Receiver() as receiver:
        telemetry = Telemetry(receiver.url, None, "engine", real_engine.target_name)
        with served(real_engine, telemetry) as client:
            info = client.post("/admin/speculation", json={"enabled": False}).json()
            assert info["speculation"] is False
            client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, "ignore_eos": True})
            wait_until(lambda: len(receiver.stored()) == 1, "the record arrived")
            client.post("/admin/speculation", json={"enabled": True})
            client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, "ignore_eos": True})
            wait_until(lambda: len(receiver.stored()) == 2, "the record arrived")
    off, on = receiver.stored()
    assert (off["method"], off["draft"], off["draft_version"], off["drafted"]) == ("none", "none", "none", 0)
    assert on["method"] == "draft_model"
    assert on["drafted"] > 0


def test_lookahead_is_served_and_recorded_with_its_settings(models: Path) -> None:
    engine = Engine(EngineConfig(str(models / "target"), drafter="lookahead", lookahead_window=3, threads=1))
    with (
        Receiver() as receiver,
        served(engine, Telemetry(receiver.url, None, "engine", engine.target_name)) as client,
    ):
        asked: dict[str, Any] = {"model": "target", "prompt": "def main", "max_tokens": 60, "seed": 5}
        texts = {
            openai_client(client).completions.create(**asked, extra_body=body).choices[0].text
            for body in ({"ignore_eos": True}, {"ignore_eos": True, "num_speculative_tokens": 0})
        }
        info = client.get("/admin/info").json()
        wait_until(lambda: len(receiver.stored()) == 2, "the records arrived")
    assert len(texts) == 1
    assert (info["draft"]["version"], info["verification"]) == ("lookahead-3-4-3", "tree")
    told = {(line["method"], line["draft_version"], line["verification"]) for line in receiver.stored()}
    assert ("lookahead", "lookahead-3-4-3", "tree") in told


def test_metrics_agree_with_the_responses(real_client: httpx.Client) -> None:
    prompt = "import" * 25  # more than a chunk
    bodies = [
        real_client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 16, "seed": seed}).json()
        for seed in range(4)
    ]
    counts = [body["metrics"]["speculative_decoding"] for body in bodies]
    text = real_client.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def total(name: str) -> float:
        return sum(sample.value for sample in samples if sample.name == f"driftguard_engine_{name}")

    assert total("draft_tokens_total") == sum(one["num_draft_tokens"] for one in counts)
    assert total("accepted_tokens_total") == sum(one["num_accepted_draft_tokens"] for one in counts)
    assert total("steps_total") == sum(one["num_spec_steps"] for one in counts)
    assert total("position_draft_tokens_total") == total("draft_tokens_total")
    assert total("position_accepted_tokens_total") == total("accepted_tokens_total")
    assert total("output_tokens_total") == sum(body["usage"]["completion_tokens"] for body in bodies)
    cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in bodies]
    assert cached == [0, 128, 128, 128]
    assert (total("prompt_tokens_total"), total("reused_prompt_tokens_total")) == (4 * 150, sum(cached))
    assert total("requests_total") == 4
    reasons = {
        sample.labels["finish_reason"]: sample.value
        for sample in samples
        if sample.name == "driftguard_engine_requests_total"
    }
    assert reasons == {"stop": 0, "length": 4, "abort": 0, "error": 0}  # so that rates see the first one
    assert total("request_latency_seconds_count") == 4
    assert total("time_to_first_token_seconds_count") == 4
    [info] = [sample for sample in samples if sample.name == "driftguard_engine_info"]
    assert info.labels["verify_backend"] == "reference"
    assert (info.labels["device"], info.labels["dtype"]) == ("cpu", "float32")
    assert total("running_requests") == total("cached_tokens") == 0
    assert total("cache_capacity_tokens") % total("slots") == 0
    assert info.labels["draft_version"] == real_client.get("/admin/info").json()["draft"]["version"]
    assert "_created" not in text
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in families)


def test_a_server_that_stops_does_not_wait_for_the_draft_that_it_prepares(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "runs_ahead", lambda _: True)  # as on a GPU
    engine = Engine(EngineConfig(str(models / "target"), str(models / "poor"), threads=1, max_batch=1))
    first, preparing = engine.draft, Event()
    shapes = engine._decoder.shapes

    def held(drafter: Any) -> Any:
        preparing.set()
        engine._no_more_drafts.wait(PATIENCE_SECONDS)
        return shapes(drafter)

    monkeypatch.setattr(engine._decoder, "shapes", held)
    with ThreadPoolExecutor(1) as pool:
        with served(engine) as client:
            url, body = client.base_url.join("/admin/drafts"), {"directory": str(models / "good")}
            answer = pool.submit(httpx.post, url, json=body, timeout=PATIENCE_SECONDS)
            assert preparing.wait(PATIENCE_SECONDS)
        refused = answer.result()
    assert (refused.status_code, refused.json()["code"]) == (503, "engine_unavailable")
    assert engine.drafts == [first]
