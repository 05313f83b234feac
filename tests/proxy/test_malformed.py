"""Requests that are malformed, or that two servers could read differently: nothing of them goes upstream."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence

import pytest
from aiohttp import web
from yarl import URL

from tests.conftest import PATIENCE_SECONDS
from tests.proxy.engines import vllm
from tests.proxy.serving import Setup, proxied

GENERATION = "/v1/chat/completions"


async def ok(_: web.BaseRequest) -> web.StreamResponse:
    return web.Response(body=b"ok")


async def asked(setup: Setup, pieces: Sequence[bytes]) -> bytes:
    """The answer, to the end of the connection, to a request that comes piece by piece."""
    url = URL(setup.proxy)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(0.1 if len(pieces) > 1 else 0)
    answer = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
    writer.close()
    return answer


def head(*lines: str, path: str = "/x", version: str = "1.1", host: str = "x") -> bytes:
    return "\r\n".join([f"POST {path} HTTP/{version}", f"Host: {host}", *lines, "", ""]).encode()


CHUNKED, LENGTH, EMPTY = "Transfer-Encoding: chunked", "Content-Length: 5", b"0\r\n\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        [head(LENGTH, CHUNKED) + EMPTY],
        [head(CHUNKED, LENGTH) + EMPTY],
        [head("Content-Length: 0", CHUNKED) + b"5\r\nhello\r\n" + EMPTY],
        [head(LENGTH, "Content-Length: 6") + b"hello"],
        [head("Content-Length: 5, 5") + b"hello"],
        *([head(f"Content-Length: {length}")] for length in ("-1", "+5", "abc", "0x5", "5 5", "9" * 30)),
        *(
            [head(f"Transfer-Encoding: {coding}") + EMPTY]
            for coding in ("gzip, chunked", "xchunked", "identity", "chunked, identity", "chunked, chunked")
        ),
        [head("Transfer-Encoding: gzip", CHUNKED) + EMPTY],
        [head("Transfer-Encoding : chunked") + EMPTY],
        [head("Transfer-Encoding:\x0bchunked") + EMPTY],
        [head("Transfer-Encoding:", " chunked") + EMPTY],
        [head(CHUNKED, version="1.0") + EMPTY],
        [head(CHUNKED) + b"5\nhello\n0\n\n"],
        [head(CHUNKED) + b"-5\r\nhello\r\n" + EMPTY],
        [head(CHUNKED) + b"f" * 20 + b"\r\nhello\r\n" + EMPTY],
        *([head(host=host)] for host in ("a b", "a@b", "a/b", "[", "a:b:c", "a:99x", "<script>")),
        [b"GET / HTTP/1.1\r\n\r\n"],
        [b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"],
        [b"GET / HTTP/1.1\r\nHost: a\r\nA: b\x00c\r\n\r\n"],
        [b"GET / HTTP/1.1\r\nHost: a\r\nX-User: Jos\xe9\r\n\r\n"],
        [b"GET / HTTP/1.1\nHost: a\n\n"],
        [head(path="/a#b?c")],
        [head(path="/\xe9")],
        [head(path="/a b")],
        [head(path="/" + "a" * 70_000)],
        [head(path="http://[::1/")],
        [head(path="http://a:999999/")],
        *(
            [head(CHUNKED, path=path) + b"5\r\nhello\r\n", b"ZZ\r\n"]  # ends badly after a good beginning
            for path in ("/x", GENERATION)
        ),
    ],
    ids=lambda pieces: str(pieces[0][:60]),
)
def test_what_is_malformed_or_ambiguous_is_refused_and_goes_no_further(
    pieces: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with proxied(ok, engine="vllm") as setup:
            first = pieces[0].replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
            answer = await asked(setup, [first, *pieces[1:]])
            assert answer[8:13] == b" 400 ", answer[:200]
            assert setup.seen == []

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    assert not [record for record in caplog.records if "hello" in record.getMessage() or record.exc_info]


BEHIND = b"GET /behind HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("status", [200, 502])
@pytest.mark.parametrize("is_at_once", [True, False])
def test_trailers_are_no_headers_of_the_next_request(is_at_once: bool, status: int) -> None:
    """A reverse proxy sends requests of many clients over one connection."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if status != 200:
            assert request.transport is not None
            request.transport.close()
        return await ok(request)

    async def scenario() -> None:
        async with proxied(answer) as setup:
            body = b"5\r\nhello\r\n0\r\nX-Other: 1\r\nX-DriftGuard-Segment: theirs\r\n\r\n"
            pieces = [head(CHUNKED) + body, BEHIND]
            answers = await asked(setup, [b"".join(pieces)] if is_at_once else pieces)
            assert answers.startswith(b"HTTP/1.1 %d " % status)
            assert answers.count(b"HTTP/1.1") == answers.count(b"Connection: close") == 1
            assert [seen.target for seen in setup.seen] == ["/x"]

    asyncio.run(scenario())


def test_a_body_in_chunks_without_trailers_leaves_the_connection_open() -> None:
    async def scenario() -> None:
        async with proxied(ok) as setup:
            body = b"5\r\nhello\r\n" + EMPTY
            for pieces in (
                [head(CHUNKED) + body, BEHIND],
                [head(CHUNKED), *(body[n : n + 1] for n in range(len(body))), BEHIND],
            ):
                setup.seen.clear()
                answers = await asked(setup, pieces)
                assert answers.count(b"HTTP/1.1 200") == 2
                assert [(seen.target, seen.body) for seen in setup.seen] == [
                    ("/x", b"hello"),
                    ("/behind", b""),
                ]

    asyncio.run(scenario())


def test_the_end_of_a_stream_is_told_to_a_client_of_http_1_0_that_keeps_its_connection() -> None:
    """As nginx by default, where it passes the Connection of its client on: it would wait for the end."""

    async def stream(request: web.BaseRequest) -> web.StreamResponse:
        if request.path != "/x":
            return await ok(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def scenario() -> None:
        async with proxied(stream) as setup:
            kept = head("Connection: keep-alive", path="/short", version="1.0")
            answers = await asked(setup, [kept, head("Connection: keep-alive", version="1.0")])
            assert answers.startswith(b"HTTP/1.0 200")
            assert answers.count(b"Connection: keep-alive") == 1, "that of the short answer"
            assert answers.endswith(b"\r\n\r\ndata: [DONE]\n\n")

    asyncio.run(scenario())


def test_a_client_of_http_1_0_gets_no_interim_answer() -> None:
    """It would take it for the answer, as nginx in front of the proxy by default."""

    async def scenario() -> None:
        async with proxied(ok) as setup:
            asking = head("Expect: 100-continue", "Content-Length: 2", version="1.0")
            assert (await asked(setup, [asking + b"{}"])).startswith(b"HTTP/1.0 200")
            assert setup.seen[0].body == b"{}"

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/" + "a" * 5_000, "//other/x", "/a/../b/%2e%2e/c?%zz%00"])
def test_what_is_only_unusual_passes_as_it_is(path: str) -> None:
    async def scenario() -> None:
        async with proxied(ok) as setup:
            assert b" 200 " in await asked(setup, [head("Connection: close", path=path)])
            assert [seen.target for seen in setup.seen] == [path]

    asyncio.run(scenario())


DEEP = "[" * 90_000 + "]" * 90_000
WIDE = ", ".join(f'"{number}": 0' for number in range(1_001))
HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    "body",
    [
        f'{{"model": "m", "prompt": {DEEP}}}',
        f'{{"model": "m", "n": {DEEP}}}',
        f'{{"model": "m", "temperature": {DEEP}}}',
        f'{{"model": "m", "user": {DEEP}}}',
        f'{{"model": "m", "stream": true, "stream_options": {DEEP}}}',
        f'{{"model": "m", "stream": true, {WIDE}}}',
        f'{{"model": "m", "stream": true, "stream_options": {{{WIDE}}}}}',
        f'{{"model": "m", "temperature": {HUGE}}}',
        f'{{"model": "m", "sampling_param_temperature": {HUGE}}}',
        '{"model": "m", "n": 1e999}',
        '{"model": "m", "temperature": 1e999}',
        '{"model": "m", "user": 1e999}',
        b'{"model": "m", "user": "\xff"}',
        b'{"model": "m", "sampling_params": "\xff"}',
    ],
    ids=lambda body: str(body[:40]),
)
def test_json_that_cannot_be_read_inside_passes_and_is_counted(body: str | bytes) -> None:
    """Not one request beside it is lost either."""
    body = body if isinstance(body, bytes) else body.encode()

    async def engine(request: web.BaseRequest) -> web.StreamResponse:
        answer = vllm({"model": "m"})
        assert isinstance(answer, bytes)
        return web.Response(body=answer, content_type="application/json")

    async def scenario() -> None:
        async with proxied(engine, engine="vllm", session_from="json:user") as setup:
            async with setup.client.post(setup.proxy + GENERATION, data=body) as answer:
                assert answer.status == 200
            assert [seen.body for seen in setup.seen] == [body]
            async with setup.client.post(setup.proxy + GENERATION, data=json.dumps({"model": "m"})) as answer:
                assert answer.status == 200
            assert len(await setup.sidecar.wait_for(1)) == 1
            async with setup.client.get(setup.admin + "/driftguard/metrics") as answer:
                counted = 'requests_total{outcome="answered",record="malformed_request"} 1.0'
                assert counted in await answer.text()

    asyncio.run(scenario())
