"""An upstream that closes a connection while the proxy uses it again, as llama-server does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from tests.proxy.serving import Setup, proxied
from tests.proxy.test_connections import ok

COMPLETIONS = "/v1/completions"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@dataclass
class Closing:
    """Answers `answered` requests of each connection, and closes it when the next one has come: after
    `begun`, the first bytes of an answer."""

    answered: int = 1
    begun: bytes = b""
    bodies: list[bytes] = field(default_factory=list)  # of all requests that came
    unanswered: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = self.answered
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = next(
                (
                    int(line[15:])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length:")
                ),
                0,
            )
            self.bodies.append(await reader.readexactly(length))
            if not left:
                self.unanswered += 1
                writer.write(self.begun)
                break
            left -= 1
            writer.write(ANSWER)
        writer.close()


@asynccontextmanager
async def before(upstream: Closing) -> AsyncIterator[Setup]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await upstream.serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with proxied(ok, upstream=url, engine="other") as setup:
            yield setup
    finally:
        server.close()


async def post(setup: Setup, number: int, path: str = COMPLETIONS) -> int:
    body = json.dumps({"model": "m", "prompt": f"{number}"}).encode()
    async with setup.client.post(setup.proxy + path, data=body) as answer:
        await answer.read()
        return answer.status


def test_a_generation_is_asked_again_on_another_connection() -> None:
    async def scenario() -> None:
        upstream = Closing()
        async with before(upstream) as setup:
            statuses = [await post(setup, number) for number in range(40)]
        assert statuses == [200] * 40
        assert upstream.unanswered == 39
        assert json.loads(upstream.bodies[-1])["prompt"] == "39"

    asyncio.run(scenario())


def test_many_connections_that_are_all_closed_are_passed_over() -> None:
    async def scenario() -> None:
        upstream = Closing()
        async with before(upstream) as setup:
            for _ in range(5):
                statuses = await asyncio.gather(*(post(setup, number) for number in range(30)))
                assert statuses == [200] * 30

    asyncio.run(scenario())


def test_an_upstream_that_closes_a_new_connection_is_asked_once() -> None:
    """The request may be what broke it."""

    async def scenario() -> None:
        upstream = Closing(answered=0)
        async with before(upstream) as setup:
            assert await post(setup, 1) == 502
        assert upstream.unanswered == 1

    asyncio.run(scenario())


def test_an_answer_that_has_begun_is_not_asked_for_again() -> None:
    async def scenario() -> None:
        upstream = Closing(begun=b"HTTP/1.1 200 OK\r\nContent-Le")
        async with before(upstream) as setup:
            assert await post(setup, 1) == 200
            assert await post(setup, 2) == 502
        assert upstream.unanswered == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/slots/0?action=erase", "/v1/files"])
def test_what_may_change_something_is_not_sent_twice(path: str) -> None:
    async def scenario() -> None:
        upstream = Closing()
        async with before(upstream) as setup:
            assert await post(setup, 1, path) == 200
            assert await post(setup, 2, path) == 502
        assert upstream.unanswered == 1

    asyncio.run(scenario())
