"""What the plugin records, and what it does where vLLM or the environment is not as it should be."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from driftguard.records import AcceptanceRecord, decode_record
from driftguard.settings.loading import PLUGIN_VARIABLES
from driftguard.store.database import Database
from driftguard_vllm import RequestLabels, labels, register
from driftguard_vllm.captures import LINGER_SECONDS, Captured, CaptureSender
from driftguard_vllm.plugin import HookMissing, install
from driftguard_vllm.request_counts import Speculation
from driftguard_vllm.settings import NAMES, PREFIX, BadEnvironment, PluginSettings
from tests.alerting.http_receiver import wait_until
from tests.pipeline.sidecar import running_sidecar
from tests.store.samples import make_records
from tests.tls import tls_sidecar
from tests.vllm_plugin.fake_vllm import Request, SamplingParams, Scheduler, installed


@pytest.fixture
def sidecar(database: Database, tmp_path: Path) -> Iterator[httpx.Client]:
    with running_sidecar(database, tmp_path) as client:
        yield client


def settings(url: str, **more: str) -> PluginSettings:
    found = PluginSettings.of({"DRIFTGUARD_VLLM_SIDECAR": url, "DRIFTGUARD_VLLM_SERVER": "gpu-1", **more})
    assert found is not None
    return found


def records(sidecar: httpx.Client, count: int) -> list[AcceptanceRecord]:
    def stored() -> list[AcceptanceRecord]:
        answer = sidecar.get("/api/v1/records", params={"format": "jsonl"})
        return [decode_record(line) for line in answer.content.splitlines()]

    wait_until(lambda: len(stored()) == count, f"{count} records")
    return stored()


def test_a_request_that_ends_in_any_way_is_recorded_with_the_counts_of_its_steps(
    sidecar: httpx.Client,
) -> None:
    with installed() as (scheduler_class, _):
        install(settings(str(sidecar.base_url)))
        scheduler = scheduler_class()
        one, other = Request("one"), Request("other", SamplingParams(temperature=0.7))
        for request in (one, other):
            scheduler.step(request, 0, [5])
        scheduler.step(one, 3, [6, 7, 8])
        scheduler.step(other, 3, [6])
        scheduler.step(one, 2, [9, 10])
        for request in (one, other):
            assert scheduler._free_request(request) == "freed"
        scheduler._free_request(Request("aborted before it ran"))
        scheduler.shutdown()
    first, second = sorted(records(sidecar, 2), key=lambda record: -record.steps)
    assert (first.steps, first.drafted, first.accepted, first.emitted) == (2, 5, 3, 5)
    assert first.accepted_per_position == [2, 1, 0]
    assert (first.prompt_tokens, first.output_tokens, first.num_speculative_tokens) == (3, 6, 3)
    assert (first.server, first.target, first.draft, first.method) == (
        *("gpu-1", "org/target", "small", "draft_model"),
    )
    assert (first.acceptance_rule, second.acceptance_rule) == ("greedy", "rejection")
    assert (first.verification, second.verification) == ("greedy", "token")
    assert (second.steps, second.drafted, second.accepted, second.emitted) == (1, 3, 0, 1)


def test_an_error_of_its_own_ends_the_recording_and_no_request(
    sidecar: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with installed() as (scheduler_class, _):
        install(settings(str(sidecar.base_url)))
        scheduler, broken = scheduler_class(), Request("broken")
        scheduler.step(broken, 0, [5])
        del broken.arrival_time
        assert scheduler._free_request(broken) == "freed"
        good = Request("good")
        scheduler.step(good, 0, [5])
        assert scheduler._free_request(good) == "freed"
        scheduler.shutdown()
    assert "DriftGuard records nothing from here on" in caplog.text
    assert records(sidecar, 0) == []


def test_a_request_whose_numbers_contradict_each_other_is_left_out_alone(
    sidecar: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with installed() as (scheduler_class, _):
        install(settings(str(sidecar.base_url)))
        scheduler, odd, good = scheduler_class(), Request("odd"), Request("good")
        scheduler.step(odd, 0, [5])
        scheduler.step(odd, 1, [6, 7, 8])  # two of one draft token
        scheduler.step(good, 0, [5])
        for request in (odd, good):
            scheduler._free_request(request)
        scheduler.shutdown()
    assert "a request is not recorded" in caplog.text
    assert [record.output_tokens for record in records(sidecar, 1)] == [1]
    (missing,) = sidecar.get("/api/v1/status").json()["unrecorded"]
    assert (missing["server"], missing["reasons"]) == ("gpu-1", {"contradiction": 1})


def test_token_ids_are_sent_of_all_requests_until_the_sidecar_forbids_it(
    sidecar: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """That one keeps none: `capture.enabled` is off."""
    with installed() as (scheduler_class, _):
        install(settings(str(sidecar.base_url), DRIFTGUARD_VLLM_CAPTURE_FRACTION="1"))
        scheduler, request = scheduler_class(), Request("one")
        scheduler.step(request, 0, [5])
        scheduler._free_request(request)
        wait_until(lambda: "the sidecar keeps no token ids" in caplog.text, "the warning")
        scheduler.shutdown()
    assert len(records(sidecar, 1)) == 1


def test_a_sidecar_that_forbids_capture_is_asked_again_a_minute_later_and_told_of_once(
    sidecar: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    captures = CaptureSender(str(sidecar.base_url), None)
    batch: list[Captured] = [(make_records(1)[0], [1, 2], [3])]
    assert [captures._send(batch) for _ in range(2)] == [60.0, 60.0]  # whoever turns it on waits for it
    assert caplog.text.count("keeps no token ids") == 1


def test_a_key_that_the_sidecar_refuses_is_told_once_until_it_takes_token_ids_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A batch is sent every second."""
    captures, told = CaptureSender("http://sidecar", "wrong"), {"accepted": 1, "duplicates": 0}
    answers = [httpx.Response(status, json=told) for status in (401, 401, 401, 200, 401)]
    captures._http = httpx.Client(
        base_url="http://sidecar", transport=httpx.MockTransport(lambda _: answers.pop(0))
    )
    while answers:
        captures._send([(make_records(1)[0], [1, 2], [3])])
    assert caplog.text.count("the sidecar refuses token ids") == 2


def test_token_ids_reach_a_sidecar_by_the_authority_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tls_sidecar(tmp_path) as sidecar:
        monkeypatch.setenv("SSL_CERT_FILE", str(sidecar.authority))
        captures = CaptureSender(sidecar.url, None)
        captures.send(make_records(1)[0], [1, 2], [3])
        captures.close(60.0)
    assert sidecar.paths == ["/api/v1/captures"]


def test_authorities_that_cannot_be_read_are_named_where_the_sidecar_has_tls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    assert settings("http://sidecar").sidecar == "http://sidecar"
    with pytest.raises(BadEnvironment, match="SSL_CERT_FILE: no certificates in /nowhere"):
        settings("https://sidecar")


def test_token_ids_that_are_too_large_for_one_body_are_sent_in_parts() -> None:
    found: list[str] = []

    def answer(body: bytes) -> httpx.Response:
        lines = body.splitlines()
        if len(lines) > 3 or b"[9," in body:
            return httpx.Response(413, json={"title": "Too large", "status": 413, "detail": "too large"})
        found.extend(json.loads(line)["record_id"] for line in lines)
        return httpx.Response(200, json={"accepted": len(lines), "duplicates": 0})

    captures = CaptureSender("http://sidecar", None)
    captures._http = httpx.Client(
        base_url="http://sidecar", transport=httpx.MockTransport(lambda request: answer(request.content))
    )
    some = make_records(40)
    for number, record in enumerate(some):
        captures.send(record, [9 if number == 7 else 1, 2], [3])  # one is too large by itself
    captures.close(60.0)
    assert found == [str(record.record_id) for number, record in enumerate(some) if number != 7]
    small: list[Captured] = [(record, [1, 2], [3]) for record in some[:3]]
    captures._most_at_once = 1
    for waiting, pause in ((2, 0.0), (1, LINGER_SECONDS)):  # a full batch goes at once, and grows again
        captures._waiting.extend(small[:waiting])
        assert captures._send(small) == pause
        captures._waiting.clear()
    assert captures._most_at_once == 4


@pytest.mark.parametrize(
    ("backend", "version"), [("driftguard", "v2"), ("nccl", "v1"), (None, "v1")], ids=str
)
def test_records_are_of_the_draft_that_was_loaded_when_their_request_began(
    sidecar: httpx.Client, backend: str | None, version: str
) -> None:
    """The version of another backend's weights is not that of the draft."""
    with installed() as (scheduler_class, _):
        install(settings(str(sidecar.base_url), DRIFTGUARD_VLLM_DRAFT_VERSION="v1"))
        scheduler, core = scheduler_class(), loaded("vllm.v1.engine.core", "EngineCore")(backend)
        before, after = Request("before"), Request("after")
        scheduler.step(before, 0, [5])
        core.set_weight_version("v2")
        assert core.weight_version == "v2"
        scheduler.step(after, 0, [5, 6])
        for request in (before, after):
            scheduler.step(request, 3, [6, 7])
            scheduler._free_request(request)
        scheduler.shutdown()
    found = {record.output_tokens: record.draft_version for record in records(sidecar, 2)}
    assert found == {3: "v1", 4: version}


def test_it_offers_to_load_drafts_in_every_process_and_more_than_once() -> None:
    with installed():
        for _ in range(2):
            install(settings("http://127.0.0.1:1"))
        registry = loaded("vllm.distributed.weight_transfer.factory", "WeightTransferEngineFactory").registry
    assert registry == {"driftguard": ("driftguard_vllm.draft_weights", "DraftLoader")}


@pytest.mark.parametrize("missing", ["vllm.v1.engine.core", "vllm.distributed.weight_transfer.factory"])
def test_a_vllm_that_cannot_load_drafts_is_recorded_all_the_same(
    sidecar: httpx.Client, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    with installed() as (scheduler_class, _), caplog.at_level(logging.INFO):
        sys.modules[missing] = ModuleType(missing)
        install(settings(str(sidecar.base_url)))
        scheduler, request = scheduler_class(), Request("one")
        scheduler.step(request, 0, [5])
        scheduler._free_request(request)
        scheduler.shutdown()
    assert f"drafts are loaded at start only: vLLM has no {missing}:" in caplog.text
    assert len(records(sidecar, 1)) == 1


def loaded(module: str, name: str) -> Any:
    return getattr(sys.modules[module], name)


class OtherScheduler(Scheduler):
    def make_spec_decoding_stats(self, stats: object, drafts: dict[str, int]) -> str:  # type: ignore[override]
        return "other"


def test_a_vllm_whose_methods_differ_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with installed(OtherScheduler) as (scheduler_class, processor_class):
        before = dict(vars(scheduler_class)), dict(vars(processor_class))
        with pytest.raises(HookMissing, match=r"make_spec_decoding_stats .* num_draft_tokens, "):
            install(settings("http://127.0.0.1:1"))
        assert (dict(vars(scheduler_class)), dict(vars(processor_class))) == before


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("DRIFTGUARD_VLLM_SIDECAR", "sidecar:8200", "not an http:// or https:// address"),
        ("DRIFTGUARD_VLLM_SIDECAR", "http://[::1", "its host or port cannot be read"),
        ("DRIFTGUARD_VLLM_CAPTURE_FRACTION", "20%", "not a number between 0 and 1"),
        ("DRIFTGUARD_VLLM_CAPTURE_FRACTION", "nan", "not a number between 0 and 1"),
        ("DRIFTGUARD_VLLM_DRAFTVERSION", "v1", "is not known; known are"),
        ("DRIFTGUARD_API_KEY", "dg_a b", "other characters than"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str, problem: str) -> None:
    with pytest.raises(BadEnvironment, match=f"{variable}.*{problem}"):
        PluginSettings.of({"DRIFTGUARD_VLLM_SIDECAR": "http://sidecar:8200", variable: value})


def test_the_sidecar_takes_no_variable_of_the_plugin_for_a_setting_misspelt() -> None:
    assert {PREFIX + name for name in NAMES} == PLUGIN_VARIABLES


def test_vllm_starts_though_a_variable_is_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DRIFTGUARD_VLLM_SIDECAR", "sidecar:8200")
    with installed(), caplog.at_level(logging.ERROR):
        register()
    assert "DriftGuard records nothing here: DRIFTGUARD_VLLM_SIDECAR" in caplog.text


def test_without_a_sidecar_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRIFTGUARD_VLLM_SIDECAR", raising=False)
    register()  # there is no vLLM here


def test_labels_reach_the_engine_with_what_a_request_asked_already() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        params = SamplingParams(extra_args={"kv_transfer_params": {}})
        labels.put_into(params)
        scope["found"] = params.extra_args

    async def asked(*headers: tuple[bytes, bytes]) -> Any:
        scope: dict[str, Any] = {"type": "http", "headers": list(headers)}
        await RequestLabels(app)(scope, None, None)  # type: ignore[arg-type]
        return scope["found"]

    async def scenario() -> None:
        both = await asked((b"x-driftguard-segment", b"support-de"), (b"x-driftguard-session", b"s-1"))
        assert labels.of(SamplingParams(extra_args=both)) == {"segment": "support-de", "session": "s-1"}
        assert both["kv_transfer_params"] == {}
        for text in ("größe", "日本語"):
            found = await asked((b"x-driftguard-segment", text.encode()))
            assert labels.of(SamplingParams(extra_args=found)) == {"segment": text}
        for unusable in (b"", b"x" * 257, b"a\x07b", b"Jos\xe9"):
            assert await asked((b"x-driftguard-segment", unusable)) == {"kv_transfer_params": {}}

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ({}, ("rejection", "token")),
        ({"rejection_sample_method": "standard"}, ("rejection", "token")),
        ({"rejection_sample_method": "block"}, ("rejection", "block")),
        ({"rejection_sample_method": "synthetic"}, ("unknown", "unknown")),
        ({"rejection_sample_method": "fly"}, ("unknown", "unknown")),
    ],
)
def test_how_vllm_verifies_is_told_as_far_as_it_is_lossless(
    method: dict[str, str], told: tuple[str, str]
) -> None:
    with installed() as (scheduler_class, _):
        config = scheduler_class().vllm_config
        vars(config.speculative_config).update(method)
        how = Speculation.of(config, settings("http://127.0.0.1:1"))
    assert (how.rule, how.verification) == told
