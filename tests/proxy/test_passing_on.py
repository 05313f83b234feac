"""Requests and answers that need nothing from the proxy but to be passed on, and what breaks on the way."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from openai import AsyncOpenAI
from yarl import URL

from tests.conftest import PATIENCE_SECONDS
from tests.proxy.engines import DONE, Json, vllm
from tests.proxy.serving import Handler, answering, proxied, served
from tests.tls import tls_sidecar

CHAT: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
PATH = "/v1/chat/completions"


async def _echo(request: web.BaseRequest) -> web.StreamResponse:
    headers = {"X-Method": request.method, "X-Target": request.raw_path, "Set-Cookie": "a=b"}
    response = web.Response(status=207, reason="Odd", body=await request.read(), headers=headers)
    response.headers.add("Set-Cookie", "c=d")
    return response


def test_any_method_path_and_status_pass() -> None:
    async def scenario() -> None:
        async with proxied(_echo) as setup:
            for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "POST", "PURGE"):
                target = "/a%2Fb/c%20d;e?x=1&x=%C3%BC&y"
                url = URL(setup.proxy + target, encoded=True)
                async with setup.client.request(method, url, data=b"body") as answer:
                    assert (answer.status, answer.reason) == (207, "Odd")
                    assert answer.headers["X-Method"] == method
                    assert answer.headers["X-Target"] == target
                    assert answer.headers.getall("Set-Cookie") == ["a=b", "c=d"]
                    assert await answer.read() == b"body"

    asyncio.run(scenario())


def test_headers_of_one_connection_do_not_pass_and_the_others_do() -> None:
    async def engine(request: web.BaseRequest) -> web.StreamResponse:
        headers = {"Connection": "X-Private", "X-Private": "1", "X-Public": "ü", "Server": "engine"}
        return web.Response(body=b"{}", headers=headers, content_type="application/json")

    sent = {
        "Authorization": "Bearer user",
        "Connection": "X-Hop, Upgrade, HTTP2-Settings",
        "Upgrade": "h2c",  # Java's client and curl --http2 offer it with each first request
        "HTTP2-Settings": "AAMAAABkAAQAAP__",
        "X-Hop": "1",
        "TE": "trailers",
        "X-Forwarded-For": "10.0.0.1",
        "X-Text": "grüße",
        "Host": "llm.example",
    }

    async def scenario() -> None:
        async with proxied(engine) as setup:
            async with setup.client.post(setup.proxy + "/x", headers=sent, data=b"body") as answer:
                assert "X-Private" not in answer.headers
                assert (answer.headers["X-Public"], answer.headers["Server"]) == ("ü", "engine")
            (seen,) = setup.seen
            assert seen.body == b"body"
            assert seen.headers["Authorization"] == "Bearer user"
            assert seen.headers["X-Text"] == "grüße"
            assert seen.headers["X-Forwarded-For"] == "10.0.0.1, 127.0.0.1"
            assert seen.headers["Via"] == "1.1 driftguard"
            assert not {"X-Hop", "TE", "Upgrade", "HTTP2-Settings"} & set(seen.headers)
            assert seen.headers["Host"] == setup.engine.removeprefix("http://")

    asyncio.run(scenario())


def test_an_answer_with_headers_in_latin_1_loses_no_letter() -> None:
    async def engine(request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(
            b"HTTP/1.1 200 OK\r\nX-Name: Jos\xe9\r\nX-Text: gr\xc3\xbc\xc3\x9fe\r\n"
            b"Content-Length: 2\r\n\r\nok"
        )
        request.transport.close()
        return web.Response()

    async def scenario() -> None:
        async with proxied(engine) as setup, setup.client.get(setup.proxy + "/x") as answer:
            assert await answer.read() == b"ok"
            assert (answer.headers["X-Name"], answer.headers["X-Text"]) == ("José", "grüße")

    asyncio.run(scenario())


def test_head_redirects_and_empty_answers() -> None:
    async def engine(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/moved":
            return web.Response(status=307, headers={"Location": "/elsewhere"})
        if request.path == "/empty":
            return web.Response(status=204)
        return web.Response(headers={"Content-Length": "1234"})

    async def scenario() -> None:
        async with proxied(engine) as setup:
            async with setup.client.head(setup.proxy + "/x") as answer:
                assert (answer.status, answer.headers["Content-Length"]) == (200, "1234")
            async with setup.client.get(setup.proxy + "/moved", allow_redirects=False) as answer:
                assert (answer.status, answer.headers["Location"]) == (307, "/elsewhere")
            async with setup.client.get(setup.proxy + "/empty") as answer:
                assert (answer.status, await answer.read()) == (204, b"")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("target", "status", "passed"),
    [
        ("http://elsewhere:1/a?b", 207, "/a?b"),
        ("//elsewhere/a", 207, "//elsewhere/a"),
        ("/@elsewhere/", 207, "/@elsewhere/"),
        ("http://elsewhere:1", 207, "/"),
        ("*", 400, None),
        ("@elsewhere/", 400, None),
        (":80/", 400, None),
    ],
)
def test_no_target_leads_anywhere_but_upstream(target: str, status: int, passed: str | None) -> None:
    async def scenario() -> None:
        async with proxied(_echo) as setup:
            url = URL(setup.proxy)
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(f"OPTIONS {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert (await reader.readline()).split()[1] == str(status).encode()
            assert [seen.target for seen in setup.seen] == ([passed] if passed else [])
            writer.close()

    asyncio.run(scenario())


def test_large_bodies_pass_both_ways() -> None:
    async def scenario() -> None:
        async with proxied(_echo, max_inspected_bytes=100_000) as setup:
            body = os.urandom(3_000_000)
            for path in ("/files", PATH):
                async with setup.client.post(setup.proxy + path, data=body, expect100=True) as answer:
                    assert await answer.read() == body

    asyncio.run(scenario())


def test_compressed_answers_pass_as_they_are() -> None:
    async def engine(request: web.BaseRequest) -> web.StreamResponse:
        response = web.json_response({"data": "x" * 5_000})
        response.enable_compression(web.ContentCoding.gzip)
        return response

    async def scenario() -> None:
        async with proxied(engine, engine="vllm") as setup:
            for path in ("/v1/embeddings", PATH):
                async with setup.client.post(setup.proxy + path, json=CHAT) as answer:
                    assert answer.headers["Content-Encoding"] == "gzip"
                    assert (await answer.read())[:2] == b"\x1f\x8b"

    asyncio.run(scenario())


def test_websockets_are_refused_with_a_reason() -> None:
    async def scenario() -> None:
        async with proxied(_echo) as setup:
            with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
                await setup.client.ws_connect(setup.proxy + "/v1/realtime")
            assert refusal.value.status == 501
            assert setup.seen == []

    asyncio.run(scenario())


def test_an_upstream_that_is_down_is_named() -> None:
    async def scenario() -> None:
        async with (
            proxied(_echo, upstream="http://127.0.0.1:9") as setup,
            setup.client.post(setup.proxy + PATH, json=CHAT) as answer,
        ):
            problem = await answer.json(content_type="application/problem+json")
            assert (answer.status, problem["status"]) == (502, 502)
            assert problem["detail"].startswith("upstream http://127.0.0.1:9: it cannot be reached")

    asyncio.run(scenario())


def test_an_upstream_whose_certificate_is_not_trusted_is_told_as_that(tmp_path: Path) -> None:
    async def scenario(upstream: str) -> None:
        async with (
            proxied(_echo, upstream=upstream) as setup,
            setup.client.get(f"{setup.proxy}/health") as answer,
        ):
            assert answer.status == 502
            said = (await answer.json(content_type=None))["detail"]
        assert "it cannot be reached (its certificate is not trusted (" in said

    with tls_sidecar(tmp_path) as private:
        asyncio.run(scenario(private.url))


def test_an_upstream_that_is_silent_is_given_up() -> None:
    async def silent(request: web.BaseRequest) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError

    async def scenario() -> None:
        async with (
            proxied(silent, read_timeout_seconds=0.1) as setup,
            setup.client.post(setup.proxy + PATH, json=CHAT) as answer,
        ):
            assert answer.status == 504
            assert "no answer in time" in (await answer.json(content_type=None))["detail"]

    asyncio.run(scenario())


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(has_begun: bool) -> None:
    arrived = asyncio.Event()

    async def engine(request: web.BaseRequest) -> web.StreamResponse:
        if has_begun:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"data: {}\n\n")
            await arrived.wait()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def scenario() -> None:
        async with proxied(engine) as setup:
            async with setup.client.post(setup.proxy + PATH, json=CHAT) as answer:
                if has_begun:
                    assert await answer.content.readline() == b"data: {}\n"
                    arrived.set()
                    with pytest.raises(aiohttp.ClientPayloadError):
                        await answer.read()
                else:
                    assert answer.status == 502
            assert setup.sidecar.records == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"HTTP/1.1 200 OK\r\nno header at all\r\n\r\n", "the head of its answer is no HTTP/1.1"),
        (b"\x15\x03\x01\x00\x02\x02\x16", "the head of its answer is no HTTP/1.1"),  # an alert of TLS
        (b"", "it closed the connection before its answer had begun"),
    ],
)
def test_an_answer_that_is_no_http_is_told_as_that(head: bytes, said: str) -> None:
    async def engine(request: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(request.transport, asyncio.Transport)
        request.transport.write(head)
        request.transport.close()
        return web.Response()

    async def scenario() -> None:
        async with proxied(engine) as setup, setup.client.post(setup.proxy + PATH, json=CHAT) as answer:
            assert answer.status == 502
            detail = (await answer.json(content_type=None))["detail"]
            assert said in detail
            assert "no header at all" not in detail

    asyncio.run(scenario())


def _endless(cancelled: asyncio.Event) -> Handler:
    async def engine(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            while True:
                await response.write(b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n')
                await asyncio.sleep(0.005)
        finally:
            cancelled.set()

    return engine


def test_a_client_that_leaves_ends_the_request_upstream() -> None:
    async def scenario() -> None:
        cancelled = asyncio.Event()
        async with proxied(_endless(cancelled), engine="vllm") as setup:
            async with setup.client.post(setup.proxy + PATH, json=CHAT) as answer:
                await answer.content.readline()
                answer.close()
            async with asyncio.timeout(PATIENCE_SECONDS):
                await cancelled.wait()
            assert setup.sidecar.records == []

    asyncio.run(scenario())


def test_a_client_that_leaves_before_the_answer_ends_the_request_upstream() -> None:
    async def scenario() -> None:
        asked, cancelled = asyncio.Event(), asyncio.Event()

        async def engine(request: web.BaseRequest) -> web.StreamResponse:
            asked.set()
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.set()
            raise AssertionError

        async with proxied(engine, engine="vllm") as setup:
            waiting = asyncio.create_task(setup.client.post(setup.proxy + PATH, json=CHAT).__aenter__())
            async with asyncio.timeout(PATIENCE_SECONDS):
                await asked.wait()
                waiting.cancel()
                await cancelled.wait()

    asyncio.run(scenario())


def test_events_pass_one_by_one_as_they_come() -> None:
    """The engine writes the next event only when the client has the one before. The event that ends the
    answer comes with the next: it tells what the removed one would have told last."""

    async def scenario() -> None:
        received = asyncio.Queue[bytes]()

        async def engine(request: web.BaseRequest) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            events = vllm(await request.json())
            assert isinstance(events, list)
            for event in events:
                await response.write(event)
                if b'"finish_reason":"stop"' not in event and b'"choices":[]' not in event:
                    while b'"finish_reason":"stop"' in (passed := await received.get()):
                        pass
                    assert passed == event
            return response

        async with proxied(engine, engine="vllm") as setup:
            async with (
                setup.client.post(setup.proxy + PATH, json=CHAT) as answer,
                asyncio.timeout(PATIENCE_SECONDS),
            ):
                event = b""
                while event != DONE:
                    event = await answer.content.readuntil(b"\n\n")
                    received.put_nowait(event)
            await setup.sidecar.wait_for(1)

    asyncio.run(scenario())


def test_the_end_of_an_answer_arrives_where_the_usage_behind_it_does_not() -> None:
    async def engine(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in vllm(await request.json())[:-2]:
            assert isinstance(event, bytes)
            await response.write(event)
        assert request.transport is not None
        request.transport.close()
        return response

    async def scenario() -> None:
        async with proxied(engine, engine="vllm") as setup:
            got = b""
            async with setup.client.post(setup.proxy + PATH, json=CHAT) as answer:
                with suppress(aiohttp.ClientPayloadError):
                    async for piece in answer.content.iter_any():
                        got += piece
            assert got.count(b'"finish_reason":"stop"') == 1

    asyncio.run(scenario())


def test_many_streams_at_once_keep_apart() -> None:
    count = 60

    async def engine(request: web.BaseRequest) -> web.StreamResponse:
        asked = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(8):
            chunk = {"choices": [{"delta": {"content": f"{asked['user']}-{number}"}}], "model": asked["user"]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await asyncio.sleep(0)
        events = vllm(asked)
        assert isinstance(events, list)
        await response.write(b"".join(events[-2:]))
        return response

    async def scenario() -> None:
        async with proxied(engine, engine="vllm", session_from="json:user", target="t") as setup:

            async def ask(user: str) -> bytes:
                async with setup.client.post(setup.proxy + PATH, json=CHAT | {"user": user}) as answer:
                    return await answer.read()

            answers = await asyncio.gather(*(ask(f"u{number}") for number in range(count)))
            for number, answer in enumerate(answers):
                assert answer.count(f'"u{number}-'.encode()) == 8
                assert answer.count(b"data:") == 9
            records = await setup.sidecar.wait_for(count)
            assert {record.session for record in records} == {f"u{number}" for number in range(count)}
            assert max(record.concurrency or 0 for record in records) > 1

    asyncio.run(scenario())


def test_the_openai_client_works_through_it() -> None:
    async def scenario() -> None:
        async with proxied(answering(vllm), engine="vllm") as setup:
            async with AsyncOpenAI(base_url=setup.proxy + "/v1", api_key="user") as client:
                create = client.chat.completions.create
                whole = await create(model="m", messages=[{"role": "user", "content": "hi"}])
                stream = await create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
                streamed = [chunk async for chunk in stream]
            said = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
            assert said == whole.choices[0].message.content
            assert len(await setup.sidecar.wait_for(2)) == 2

    asyncio.run(scenario())


def test_a_path_before_the_api_and_a_v1_after_it_are_understood() -> None:
    async def scenario() -> None:
        async with (
            served(_echo) as engine,
            proxied(_echo, upstream=f"{engine}/llm/v1/") as setup,
            setup.client.get(setup.proxy + "/v1/models?x") as answer,
        ):
            assert answer.headers["X-Target"] == "/llm/v1/models?x"

    asyncio.run(scenario())
