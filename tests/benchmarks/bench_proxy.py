"""The proxy compared with no proxy, and with the simplest proxy that its HTTP library allows.

`python -m tests.benchmarks.bench_proxy [--seconds N] [--connections N] [--streams N] [--workers N ...]`:
requests/s of small answers and CPU time of each, with so many workers, and the time to the first event of a
streamed answer. "bare" passes bytes on with the same library and as many workers, and reads none of them. The
load is made by `wrk` if it is installed, else by a client in Python, which takes more of the cores. Load,
engine and proxies share this machine; they are measured in turn, so that other load affects all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import psutil
import uvloop
from yarl import URL

from tests.benchmarks.proxy_servers import CHAT, END
from tests.proxy.engines import Json

ROUNDS = 10
PATH = "/v1/chat/completions"
HEADERS = {
    "Content-Type": "application/json",
    "User-Agent": "bench",
    "Accept": "application/json",
    "Accept-Encoding": "gzip, deflate",
}
SERVERS = "tests.benchmarks.proxy_servers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=1, help=f"of each turn; each way has {ROUNDS}")
    parser.add_argument("--connections", type=int, default=64, help="open at a time")
    parser.add_argument("--streams", type=int, default=100, help="streamed answers of each turn")
    parser.add_argument("--workers", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    options = parser.parse_args()
    load = shutil.which("wrk") or "a client in Python"
    print(f"{platform.machine()}, {os.cpu_count()} cores shared by load ({load}), engine and proxies")
    print(f"load average before {os.getloadavg()[0]:.1f}", flush=True)
    with ExitStack() as stack:
        ways = _start_all(stack, options.workers)
        uvloop.run(_compare(ways, options))
    _report(ways)
    print(f"load average after {os.getloadavg()[0]:.1f}")


@dataclass
class Way:
    """One way to the engine, and what was measured on it."""

    name: str
    workers: int
    port: int
    processes: list[psutil.Process]
    rates: list[float] = field(default_factory=list)  # requests/s
    cpu_seconds: list[float] = field(default_factory=list)  # per request
    first_seconds: list[float] = field(default_factory=list)

    def cpu(self) -> float:
        """Seconds so far."""
        return sum(sum(process.cpu_times()[:2]) for process in self.processes)


def _start_all(stack: ExitStack, workers: Sequence[int]) -> list[Way]:
    engine = stack.enter_context(_started("direct", 1, SERVERS))
    url = f"http://127.0.0.1:{engine.port}"
    proxy = ["driftguard", "proxy", "--port", "0", "--engine", "vllm", "--draft", "small"]
    ways = [engine]
    for count in workers:
        for name, command in (
            ("bare", [SERVERS, "--bare", url]),
            ("proxy", [*proxy, "--upstream", url, "--sidecar", url]),
        ):
            ways.append(stack.enter_context(_started(name, count, *command, "--workers", str(count))))
    return ways


@contextmanager
def _started(name: str, workers: int, module: str, *arguments: str) -> Iterator[Way]:
    if name == "direct":
        arguments = ()
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            ready = next(line for line in process.stdout if "ready on " in line)
            port = URL(ready.partition("ready on ")[2].split()[0]).port
            this = psutil.Process(process.pid)
            yield Way(name, workers, port or 0, [this, *this.children()])
        finally:
            process.terminate()


async def _compare(ways: list[Way], options: argparse.Namespace) -> None:
    load = _wrk if shutil.which("wrk") else _python_client
    for turn in range(ROUNDS + 1):
        for way in ways:
            began, cpu = time.perf_counter(), way.cpu()
            count = await load(way, options.seconds, options.connections)
            if turn:  # the first warms up
                way.rates.append(count / (time.perf_counter() - began))
                way.cpu_seconds.append((way.cpu() - cpu) / count)
        for _ in range(options.streams if turn else 0):
            for way in ways:
                way.first_seconds.append(await _first_event(way))


def _report(ways: list[Way]) -> None:
    direct = ways[0]
    bare: dict[int, Way] = {}
    for way in ways:
        rate, cpu = statistics.median(way.rates), statistics.median(way.cpu_seconds)
        first = statistics.quantiles(way.first_seconds, n=100)
        added = statistics.median(a - b for a, b in zip(way.first_seconds, direct.first_seconds, strict=True))
        print(
            f"{way.name:6} x{way.workers} {rate:7,.0f} requests/s, {1e6 * cpu:4.0f} us CPU each; "
            f"first event p50 {1e3 * first[49]:.2f}, p99 {1e3 * first[98]:.2f} ms "
            f"(median added {1e3 * added:.2f})"
        )
        if way.name == "bare":
            bare[way.workers] = way
        elif way.name == "proxy":
            of = bare[way.workers]
            by_rate = statistics.median(a / b for a, b in zip(way.rates, of.rates, strict=True))
            by_cpu = statistics.median(b / a for a, b in zip(way.cpu_seconds, of.cpu_seconds, strict=True))
            print(f"       turn by turn {by_rate:.2f} of bare's requests/s, {by_cpu:.2f} by CPU time")


async def _wrk(way: Way, seconds: int, connections: int) -> int:
    """The number of requests that were answered."""
    headers = "".join(f"wrk.headers[{json.dumps(name)}] = {json.dumps(HEADERS[name])}\n" for name in HEADERS)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "chat.lua"
        script.write_text(f'wrk.method = "POST"\nwrk.body = [[{json.dumps(CHAT)}]]\n{headers}')
        process = await asyncio.create_subprocess_exec(
            *("wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(script)),
            f"http://127.0.0.1:{way.port}{PATH}",
            stdout=subprocess.PIPE,
        )
        said = (await process.communicate())[0].decode()
    assert "Non-2xx" not in said, said
    found = re.search(r"(\d+) requests in", said)
    assert found, said
    return int(found[1])


class _Client(asyncio.Protocol):
    """Asks, and asks again when it has the whole answer."""

    count = 0

    def __init__(self) -> None:
        self._request = _request(CHAT)
        self._text = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._text += data
        header, found, body = self._text.partition(END)
        if found and len(body) >= int(header.lower().partition(b"content-length: ")[2].split(b"\r")[0]):
            self._text = b""
            _Client.count += 1
            self._transport.write(self._request)


def _request(body: Json) -> bytes:
    text = json.dumps(body).encode()
    lines = [f"POST {PATH} HTTP/1.1", "host: x", *(f"{name}: {HEADERS[name]}" for name in HEADERS)]
    return "\r\n".join([*lines, f"content-length: {len(text)}"]).encode() + END + text


async def _python_client(way: Way, seconds: int, connections: int) -> int:
    """The number of requests that were answered."""
    loop, before = asyncio.get_running_loop(), _Client.count
    made = [await loop.create_connection(_Client, "127.0.0.1", way.port) for _ in range(connections)]
    await asyncio.sleep(seconds)
    for transport, _ in made:
        transport.close()
    return _Client.count - before


async def _first_event(way: Way) -> float:
    """Seconds from a request to the first event of its answer, on a connection that is open already."""
    reader, writer = await asyncio.open_connection("127.0.0.1", way.port)
    began = time.perf_counter()
    writer.write(_request(CHAT | {"stream": True}))
    await reader.readuntil(END)
    await reader.readuntil(b"\n\n")
    seconds = time.perf_counter() - began
    await reader.readuntil(b"\r\n0" + END)
    writer.close()
    return seconds


if __name__ == "__main__":
    main()
