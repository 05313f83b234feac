"""What the proxy is measured beside: an engine, and a passthrough that looks at nothing."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
from typing import cast

import aiohttp
import uvloop
from aiohttp import web

from driftguard.proxy.listening import listeners_of
from tests.proxy.engines import Json, vllm

CHAT: Json = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 53}
USAGE: Json = {"stream_options": {"include_usage": True}}
END = b"\r\n\r\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bare", help="address of the engine; without it, this is the engine")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    if options.bare is None:
        uvloop.run(_serve_engine())
    else:
        _serve_bare(options.bare, options.workers)


class _Engine(asyncio.Protocol):
    """Answers every POST at once, as vLLM does; a stream where the request asks for one."""

    def __init__(self) -> None:
        whole, events = vllm(CHAT), vllm(CHAT | {"stream": True})
        more = vllm(CHAT | {"stream": True} | USAGE)
        assert isinstance(whole, bytes)
        self._whole = _plain(whole)
        self._stored = _plain(b'{"accepted":0,"duplicates":0}')
        self._streams = [_stream(events), _stream(more)]
        self._text = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._text += data
        header, found, body = self._text.partition(END)
        if found and len(body) >= int(header.lower().partition(b"content-length: ")[2].split(b"\r")[0]):
            self._text = b""
            self._transport.write(self._answer(header, body))

    def _answer(self, header: bytes, body: bytes) -> bytes:
        if b"/records" in header:  # it plays the sidecar too
            return self._stored
        if b'"stream": true' in body:
            return self._streams[b"include_usage" in body]
        return self._whole


def _plain(body: bytes) -> bytes:
    return _response(b"application/json", b"content-length: %d" % len(body), body)


def _response(kind: bytes, length: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\n" + length + END + body


def _stream(events: bytes | list[bytes]) -> bytes:
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events if isinstance(event, bytes))
    return _response(b"text/event-stream", b"transfer-encoding: chunked", chunks + b"0" + END)


async def _serve_engine() -> None:
    server = await asyncio.get_running_loop().create_server(_Engine, "127.0.0.1", 0)
    print(f"ready on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def _serve_bare(engine: str, workers: int) -> None:
    """A process for each listener, spread over as the proxy's are."""
    every = listeners_of("127.0.0.1", 0, None, workers)
    children = [_forked(engine, other.traffic[0]) for other in every[1:]]
    print(f"ready on http://127.0.0.1:{every[0].port}", flush=True)
    uvloop.run(_pass_on(engine, every[0].traffic[0]))
    for child in children:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)


def _forked(engine: str, listener: socket.socket) -> int:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        uvloop.run(_pass_on(engine, listener))
        os._exit(0)
    return child


async def _pass_on(engine: str, listener: socket.socket) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            body = await request.read()
            async with session.post(engine + request.raw_path, data=body) as answer:
                if answer.content_type == "application/json":
                    return web.Response(body=await answer.read(), content_type=answer.content_type)
                response = web.StreamResponse(headers={"Content-Type": answer.content_type})
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                return response

        runner = web.ServerRunner(web.Server(handle, access_log=None))
        await runner.setup()
        await web.SockSite(runner, listener).start()
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        await stopped.wait()


if __name__ == "__main__":
    main()
