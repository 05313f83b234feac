"""What is recorded of a request, and why some are not."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from driftguard.proxy import upstream
from driftguard.records import PROBE_SEGMENT
from driftguard.settings import ProxySettings
from tests.alerting.http_receiver import wait_until
from tests.conftest import PATIENCE_SECONDS
from tests.proxy.engines import (
    COMPACT,
    DONE,
    VLLM_SPECULATION,
    Json,
    llamacpp,
    llamacpp_completion,
    sglang,
    triton,
    vllm,
)
from tests.proxy.serving import Setup, answering, proxied, served

CHAT: Json = {"model": "org/model", "messages": [{"role": "user", "content": "secret prompt"}]}
PATH = "/v1/chat/completions"


async def _ask(setup: Setup, body: Json | bytes, path: str = PATH, **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with setup.client.post(setup.proxy + path, data=data, headers=headers) as answer:
        return await answer.read()


async def _told(setup: Setup, body: Json | bytes, path: str = PATH, **headers: str) -> str:
    """Why a request is not recorded, by the metrics; "recorded" if it is."""
    before = await _counts(setup)
    await _ask(setup, body, path, **headers)
    after = await _counts(setup)
    (changed,) = [name for name in after if after[name] != before.get(name)]
    return changed


async def _counts(setup: Setup) -> dict[str, str]:
    async with setup.client.get(f"{setup.admin}/driftguard/metrics") as answer:
        lines = (await answer.text()).splitlines()
    found = [line.rsplit(" ", 1) for line in lines if line.startswith("driftguard_proxy_requests_total")]
    return {name.partition('record="')[2].partition('"')[0]: value for name, value in found if value != "0.0"}


def test_a_record_says_who_guessed_for_whom() -> None:
    given: dict[str, Any] = {
        "server": "chat-eu",
        "draft": "small",
        "draft_version": "v7",
        "method": "eagle3",
    }

    async def scenario() -> None:
        async with proxied(answering(vllm), engine="vllm", **given) as setup:
            labels = {"X-DriftGuard-Segment": "support-de", "X-DriftGuard-Session": "s-1"}
            await _ask(setup, CHAT | {"temperature": 0.5}, **labels)
            await _ask(setup, CHAT | {"temperature": 0})
            first, second = await setup.sidecar.wait_for(2)
            assert {name: getattr(first, name) for name in given} == given
            assert (first.target, first.segment, first.session) == ("org/model", "support-de", "s-1")
            assert (first.temperature, first.acceptance_rule) == (0.5, "unknown")
            assert first.num_speculative_tokens == 3
            assert first.accepted_per_position == [4, 3, 3]
            assert (first.prompt_tokens, first.output_tokens) == (11, 53)
            assert first.time_to_first_token_seconds == pytest.approx(0.012)
            assert first.time_per_output_token_seconds == pytest.approx(0.020)
            assert (second.segment, second.session, second.acceptance_rule) == ("default", None, "greedy")
            assert second.started_at <= second.ended_at
            assert setup.sidecar.keys == ["Bearer key"] * setup.sidecar.posts

    asyncio.run(scenario())


def test_the_server_is_named_after_its_address_without_a_name() -> None:
    async def scenario() -> None:
        async with proxied(answering(vllm), engine="vllm") as setup:
            await _ask(setup, CHAT)
            (record,) = await setup.sidecar.wait_for(1)
            assert record.server == setup.engine.removeprefix("http://")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("source", "path", "body", "segment"),
    [
        ("header:X-Route", PATH, {}, "tickets"),
        ("json:metadata.tier", PATH, {"metadata": {"tier": "gold"}}, "gold"),
        ("json:user", PATH, {"user": 17}, "17"),
        ("json:metadata.tier", PATH, {"metadata": "none"}, "default"),
        ("path", PATH, {}, PATH),
        ("model", PATH, {}, "org/model"),
    ],
)
def test_where_a_request_names_its_segment(source: str, path: str, body: Json, segment: str) -> None:
    async def scenario() -> None:
        async with proxied(answering(vllm), engine="vllm", segment_from=source, session_from=source) as setup:
            await _ask(setup, CHAT | body, path, **{"X-Route": "tickets"})
            (record,) = await setup.sidecar.wait_for(1)
            assert record.segment == segment
            assert record.session == (None if segment == "default" else segment)

    asyncio.run(scenario())


def test_several_answers_of_llamacpp_are_not_taken_for_one() -> None:
    """By its own name for OpenAI's `n`; each has its own numbers, in an event or in a list."""

    async def scenario() -> None:
        async with proxied(answering(llamacpp_completion), engine="llamacpp") as setup:
            for path in ("/completion", "/v1/completions"):
                assert await _told(setup, {"prompt": "x", "n_cmpl": 2}, path) == "several_answers"
            assert await _told(setup, {"prompt": "x", "n_cmpl": 1}, "/completion") == "recorded"

    asyncio.run(scenario())


def test_answers_by_llamacpps_path_of_responses_without_a_version_are_recorded() -> None:
    async def scenario() -> None:
        async with proxied(answering(llamacpp), engine="llamacpp") as setup:
            assert await _told(setup, CHAT, "/responses") == "recorded"

    asyncio.run(scenario())


def test_what_was_not_answered_with_200_has_failed_whatever_was_asked() -> None:
    async def engine(_: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"error": "refused"}, status=400)

    async def scenario() -> None:
        async with proxied(engine, engine="vllm", max_inspected_bytes=2_000) as setup:
            for asked in (CHAT | {"n": 2}, CHAT | {"padding": "x" * 3_000}, b"{"):
                assert await _told(setup, asked) == "failed"
            assert await _told(setup, CHAT, "/v1/embeddings") == "not_generation"

    asyncio.run(scenario())


def test_requests_that_are_not_recorded_say_why() -> None:
    def engine(request: Json) -> bytes | list[bytes]:
        if "broken" in request:
            return b'{"choices": ['
        if "silent" in request:
            return vllm(request, speculation=None)
        if "wrong" in request:
            return vllm(
                request,
                speculation={"num_spec_steps": 1, "num_draft_tokens": 1, "num_accepted_draft_tokens": 9},
            )
        if request.get("text_input") == "late":
            late = {"arrival_time_ns": 0, "first_token_time_ns": 10**400}  # no float can hold it
            return COMPACT.json({"total_draft_tokens": 0, "total_accepted_draft_tokens": 0, **late})
        if "text_input" in request:
            return triton(request)
        return vllm(request)

    async def scenario() -> None:
        async with proxied(answering(engine), engine="vllm", max_inspected_bytes=2_000) as setup:
            assert await _told(setup, CHAT) == "recorded"
            assert await _told(setup, CHAT, **{"X-DriftGuard-Segment": PROBE_SEGMENT}) == "probe"
            assert await _told(setup, CHAT, "/v1/embeddings") == "not_generation"
            assert await _told(setup, CHAT | {"n": 2}) == "several_answers"
            assert await _told(setup, CHAT | {"prompt": ["one", "two"]}) == "several_answers"
            assert await _told(setup, CHAT | {"broken": 1}) == "malformed_answer"
            assert await _told(setup, CHAT | {"silent": 1}) == "no_numbers"
            assert await _told(setup, CHAT | {"stop": "\n"}) == "stop_string"
            assert await _told(setup, CHAT | {"stop": "\n", "stream": True}) == "stop_string"
            assert await _told(setup, CHAT | {"wrong": 1}) == "contradiction"
            assert await _told(setup, CHAT | {"padding": "x" * 3_000}) == "too_large"
            assert await _told(setup, CHAT, **{"X-DriftGuard-Segment": "x" * 300}) == "bad_label"
            assert await _told(setup, {"text_input": ""}, "/v2/models/m/generate") == "setting_needed"
            assert await _told(setup, {"text_input": "late"}, "/v2/models/m/generate") == "malformed_answer"
            assert len(await setup.sidecar.wait_for(1)) == 1

    asyncio.run(scenario())


def test_a_stream_that_ends_with_an_error_has_failed_and_is_not_missing() -> None:
    """The status was sent before: engines tell of an error in an event, and end the stream in order."""

    def engine(request: Json) -> list[bytes]:
        events = vllm(request)
        assert isinstance(events, list)
        if "says" in request:
            said = {"choices": [{"index": 0, "delta": {"content": '"error": {}'}}], "error": None}
            return [COMPACT.event(said), *events]
        return [*events[:2], COMPACT.event({"error": {"message": "EngineCore", "code": 500}}), DONE]

    async def scenario() -> None:
        async with proxied(answering(engine), engine="vllm") as setup:
            assert await _told(setup, CHAT | {"stream": True}) == "failed"
            assert await _told(setup, CHAT | {"stream": True, "says": 1}) == "recorded"

    with capture_logs() as logs:
        asyncio.run(scenario())
    assert [line for line in logs if line["event"] == "requests pass unrecorded"] == []


def test_a_one_counts_as_true_as_the_engine_takes_it() -> None:
    async def scenario() -> None:
        def engine(request: Json) -> bytes | list[bytes]:
            options = {name: bool(value) for name, value in request.get("stream_options", {}).items()}
            return vllm(request | {"stream": bool(request.get("stream")), "stream_options": options})

        async with proxied(answering(engine), engine="vllm") as setup:
            assert await _told(setup, CHAT | {"stream": 1}) == "recorded"
            asked = CHAT | {"stream": 1, "stream_options": {"include_usage": 1}}
            async with setup.client.post(setup.proxy + PATH, json=asked) as answer:
                assert b'"usage"' in await answer.read()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"stop": "secret"}, "they ended on a stop string"),
        ({}, "--per-request-spec-decode-metrics summary"),
        ({"n": 2}, "they ask for several answers"),
    ],
)
def test_the_log_says_once_why_a_request_is_not_recorded_and_what_to_do(body: Json, said: str) -> None:
    async def scenario() -> None:
        engine = answering(lambda body: vllm(body, speculation=None))
        async with proxied(engine, engine="vllm") as setup:
            for _ in range(3):
                await _told(setup, CHAT | body)
            await _told(setup, CHAT, **{"X-DriftGuard-Segment": PROBE_SEGMENT})

    with capture_logs() as logs:
        asyncio.run(scenario())
    (line,) = [line for line in logs if line["event"] == "requests pass unrecorded"]
    assert said in line["hint"]
    assert "secret" not in str(line)


def test_a_request_that_is_not_json_goes_through_as_it_is() -> None:
    async def bad_request(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=400, body=b"no JSON", content_type="text/plain")

    async def scenario() -> None:
        async with proxied(bad_request, engine="sglang") as setup:
            for body in (b'{"model": "m", ', b"[1]", b"\xff\xfe", b'{"stream": true, "stream": true}'):
                assert await _ask(setup, body) == b"no JSON"
                assert setup.seen[-1].body == body
            assert setup.sidecar.records == []

    asyncio.run(scenario())


def test_a_server_that_does_not_speculate_is_recorded_for_its_latency() -> None:
    def engine(request: Json) -> bytes | list[bytes]:
        return vllm(request, speculation=None)

    async def scenario() -> None:
        async with proxied(answering(engine), engine="vllm", method="none", draft="small") as setup:
            await _ask(setup, CHAT | {"stream": True})
            (record,) = await setup.sidecar.wait_for(1)
            assert (record.method, record.draft, record.draft_version) == ("none", "none", "none")
            assert (record.steps, record.drafted, record.accepted, record.emitted) == (0, 0, 0, 0)
            assert (record.num_speculative_tokens, record.output_tokens) == (0, 53)
            assert record.time_to_first_token_seconds is not None
            assert record.time_per_output_token_seconds is not None

    asyncio.run(scenario())


def test_drafting_against_method_none_is_a_contradiction() -> None:
    async def scenario() -> None:
        async with proxied(answering(vllm), engine="vllm", method="none") as setup:
            assert await _told(setup, CHAT) == "contradiction"

    asyncio.run(scenario())


def test_an_empty_label_is_none() -> None:
    async def scenario() -> None:
        async with proxied(answering(vllm), engine="vllm", session_from="json:user") as setup:
            assert await _told(setup, CHAT | {"user": ""}, **{"X-DriftGuard-Segment": ""}) == "recorded"
            (record,) = await setup.sidecar.wait_for(1)
            assert (record.segment, record.session) == ("default", None)

    asyncio.run(scenario())


def test_a_large_k_is_recorded_with_all_its_positions() -> None:
    def engine(request: Json) -> bytes | list[bytes]:
        kept = {"acceptance_histogram": [39] + [0] * 99 + [1], "num_spec_tokens": 100}
        drafts = {"num_spec_steps": 40, "num_draft_tokens": 4_000, "num_accepted_draft_tokens": 100}
        return vllm(request, speculation=kept | drafts)

    async def scenario() -> None:
        async with proxied(answering(engine), engine="vllm") as setup:
            assert await _told(setup, CHAT) == "recorded"
            (record,) = await setup.sidecar.wait_for(1)
            assert record.accepted_per_position == [1] * 100

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "m" * 257},
        {"metrics": {"speculative_decoding": VLLM_SPECULATION, "time_to_first_token_ms": -5}},
        {"metrics": {"speculative_decoding": VLLM_SPECULATION | {"num_draft_tokens": 2**41}}},
        {"usage": {"prompt_tokens": -1, "completion_tokens": 53}},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_the_sidecar_would_refuse_is_not_counted_as_recorded(wrong: Json) -> None:
    def engine(request: Json) -> bytes:
        answer = vllm(request)
        assert isinstance(answer, bytes)
        return COMPACT.json(json.loads(answer) | wrong)

    async def scenario() -> None:
        async with proxied(answering(engine), engine="vllm") as setup:
            assert await _told(setup, CHAT) == "contradiction"

    asyncio.run(scenario())


def test_the_first_request_of_a_proxy_is_recorded_though_the_upstream_is_slow_to_tell_what_it_is() -> None:
    """Behind a load balancer it comes as soon as the proxy listens; vLLM then tells no counts of a stream."""

    async def scenario() -> None:
        async with proxied(answering(vllm), engine="auto", owned_by="vllm", models_seconds=0.1) as setup:
            assert await _told(setup, CHAT | {"stream": True}) == "recorded"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("owner", "told"), [("driftguard", "reports_itself"), ("sglang", "recorded"), ("x", "no_numbers")]
)
def test_the_upstream_is_asked_what_it_is(owner: str, told: str) -> None:
    """An engine that is not known is asked for nothing more, so SGLang's form would be missing."""

    async def scenario() -> None:
        async with proxied(answering(sglang), engine="auto", owned_by=owner) as setup:
            await asyncio.to_thread(
                wait_until, lambda: any(line["event"] == "upstream" for line in logs), "the engine's answer"
            )
            assert await _told(setup, CHAT) == told

    with capture_logs() as logs:
        asyncio.run(scenario())


def test_records_follow_a_draft_that_was_loaded_into_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request counts for the draft that it began with. Other weight versions are the target's."""
    monkeypatch.setattr(upstream, "FOLLOW_SECONDS", 0.01)
    told, asked, began, may_end = ["rl-step-7"], asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def model_info(_: web.BaseRequest) -> web.StreamResponse:
        asked.set()
        return web.json_response({"weight_version": told[0]}, status=500 if told[0] == "down" else 200)

    async def engine(request: web.BaseRequest) -> web.StreamResponse:
        if b"slow" in await request.read():
            began.set()
            await may_end.wait()
        return await answering(sglang)(request)

    async def tells(version: str) -> None:
        told[0] = version
        for _ in range(2):  # the question under way may get the answer before
            asked.clear()
            await asked.wait()

    async def scenario() -> list[str]:
        async with proxied(engine, model_info=model_info, engine="sglang", draft_version="v1") as setup:
            await tells("rl-step-7")
            await _ask(setup, CHAT)
            await tells("driftguard:v2")
            slow = asyncio.create_task(_ask(setup, CHAT | {"user": "slow"}))
            await began.wait()
            for version in ("driftguard-loading:v3", "down", "default"):
                await tells(version)
                await _ask(setup, CHAT)
            may_end.set()
            await slow
            return [record.draft_version for record in await setup.sidecar.wait_for(5)]

    assert asyncio.run(scenario()) == ["v1", "v2", "v2", "v1", "v2"]


def test_the_log_says_once_why_the_engine_is_not_known_while_it_loads_its_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For minutes: first nothing listens, then llama.cpp answers 503."""
    monkeypatch.setattr(upstream, "FOLLOW_SECONDS", 0.01)
    asked = 0

    async def loading(_: web.BaseRequest) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        if asked <= 5:
            return web.json_response({"error": {"message": "Loading model"}}, status=503)
        return web.json_response({"data": [{"id": "m", "owned_by": "llamacpp"}]})

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        async with aiohttp.ClientSession() as session:
            found = upstream.Upstream(ProxySettings(upstream=f"http://127.0.0.1:{port}"))
            identifying = asyncio.create_task(found.identify(session))
            async with served(loading) as url, asyncio.timeout(PATIENCE_SECONDS):
                await asyncio.to_thread(wait_until, lambda: bool(logs), "the first reason")
                found._models_url = f"{url}/v1/models"
                await identifying
        assert found.engine == "llamacpp"

    with capture_logs() as logs:
        asyncio.run(scenario())
    told = [line["error"] for line in logs if line["event"] == "the upstream's engine is not known yet"]
    assert told == ["Connection refused", "HTTP 503"]


@pytest.mark.parametrize(("status", "listed"), [(200, {"data": []}), (404, {"detail": "no route"})])
def test_the_engine_is_known_once_a_router_before_it_has_found_it(
    monkeypatch: pytest.MonkeyPatch, status: int, listed: Json
) -> None:
    """While vLLM loads its model, a router or gateway answers already: with no model, or no route."""
    monkeypatch.setattr(upstream, "ASK_AGAIN_SECONDS", 0.01)
    asked = 0

    async def router(_: web.BaseRequest) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        if asked <= 3:
            return web.json_response(listed, status=status)
        return web.json_response({"data": [{"id": "m", "owned_by": "vllm"}]})

    async def scenario() -> None:
        async with served(router) as url, aiohttp.ClientSession() as session:
            found = upstream.Upstream(ProxySettings(upstream=url))
            async with asyncio.timeout(PATIENCE_SECONDS):
                identifying = asyncio.create_task(found.identify(session))
                await found.was_asked.wait()  # requests pass meanwhile
                await identifying
            assert found.engine == "vllm"

    with capture_logs() as logs:
        asyncio.run(scenario())
    assert [line["status"] for line in logs if line["event"].startswith("unknown engine")] == [status]


def test_records_follow_an_sglang_that_refused_to_tell_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 429 of a gateway says nothing of the draft; who refuses for good may be another server."""
    monkeypatch.setattr(upstream, "FOLLOW_SECONDS", 0.01)
    monkeypatch.setattr(upstream, "RETRY_SECONDS", 0.01)
    told, asked = [(200, "driftguard:v2")], asyncio.Event()

    async def model_info(_: web.BaseRequest) -> web.StreamResponse:
        asked.set()
        status, version = told[0]
        return web.json_response({"weight_version": version}, status=status)

    async def scenario() -> list[str]:
        async with proxied(
            answering(sglang), model_info=model_info, engine="sglang", draft_version="v1"
        ) as setup:
            for answer in [
                (200, "driftguard:v2"),
                (429, ""),
                (404, ""),
                (200, "driftguard:v3"),
                (200, "default"),
            ]:
                told[0] = answer
                for _ in range(3):  # the question under way may get the answer before
                    asked.clear()
                    async with asyncio.timeout(PATIENCE_SECONDS):
                        await asked.wait()
                await _ask(setup, CHAT)
            return [record.draft_version for record in await setup.sidecar.wait_for(5)]

    with capture_logs() as logs:
        assert asyncio.run(scenario()) == ["v2", "v2", "v1", "v3", "v1"]
    refusals = [line["status"] for line in logs if line["event"].startswith("the upstream does not tell")]
    assert refusals == [429, 404]


def test_an_upstream_that_compresses_its_answers_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an nginx before it does for whoever accepts it."""
    monkeypatch.setattr(upstream, "FOLLOW_SECONDS", 0.01)

    def compressed(request: web.BaseRequest, found: Json) -> web.Response:
        answer = web.json_response(found)
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            answer.enable_compression(web.ContentCoding.gzip)
        return answer

    async def engine(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/v1/models":
            return compressed(request, {"data": [{"id": "m", "owned_by": "sglang"}]})
        return compressed(request, {"weight_version": "driftguard:v2"})

    async def scenario() -> None:
        async with served(engine) as url, aiohttp.ClientSession(auto_decompress=False) as session:
            asked = upstream.Upstream(ProxySettings(upstream=url))
            following = asyncio.create_task(asked.follow(session))
            async with asyncio.timeout(PATIENCE_SECONDS):
                while asked.loaded is None:
                    assert not following.done(), "it took the upstream for another engine"
                    await asyncio.sleep(0.01)
            following.cancel()
            assert (asked.engine, asked.loaded) == ("sglang", "v2")

    asyncio.run(scenario())


def test_nothing_that_is_said_leaves_the_proxy(capfd: pytest.CaptureFixture[str]) -> None:
    def engine(request: Json) -> bytes | list[bytes]:
        return COMPACT.json({"choices": "secret answer"}) if "odd" in request else vllm(request)

    async def scenario() -> list[Any]:
        async with proxied(answering(engine), engine="vllm") as setup:
            for body in (CHAT, CHAT | {"stream": True}, CHAT | {"odd": 1}, b'{"secret prompt'):
                await _ask(setup, body)
            return list(await setup.sidecar.wait_for(2))

    records = asyncio.run(scenario())
    written = "".join(capfd.readouterr()) + "".join(map(str, records))
    assert "secret" not in written
    assert "He said" not in written
