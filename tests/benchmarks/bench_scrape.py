"""What scraping costs the sidecar: CPU of one core and memory, against the same sidecar without sources.

python -m tests.benchmarks.bench_scrape [--servers N] [--seconds S]

Measured after the baselines are ready: before, each stream is folded for itself. Every server has an address
of its own (of the loopback network, so on Linux), closes a connection after 5 idle seconds, and prints 600
lines as a vLLM does, 60 kB. PostgreSQL and the fake servers are other processes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from multiprocessing import Process
from pathlib import Path

import httpx
import psutil
import uvicorn

from driftguard.demo.processes import free_port
from tests.adapters.fake_engines import MODEL, FakeVllm
from tests.benchmarks.bench_memory import wait_ready

INTERVAL_SECONDS = 15.0
OTHER_LINES = 570
START_SECONDS = 60.0  # after which a sidecar without sources has nothing left to do for its start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=8 * INTERVAL_SECONDS)
    parser.add_argument("--warm-up", type=float, default=20 * INTERVAL_SECONDS)
    options = parser.parse_args()
    alone, _ = measure(0, START_SECONDS, options.seconds)
    scraping, megabytes = measure(options.servers, options.warm_up, options.seconds)
    print(f"without sources: {100 * alone:.1f}% of one core")
    print(
        f"{options.servers} servers every {INTERVAL_SECONDS:.0f} s: {100 * scraping:.1f}% of one core "
        f"({100 * (scraping - alone):.1f}% more), {megabytes:.0f} MB resident"
    )


def measure(servers: int, warm_up_seconds: float, seconds: float) -> tuple[float, float]:
    """CPU seconds per second after the warm-up, and resident MB at the end."""
    port, metrics_port = free_port(), free_port()
    fake = Process(target=serve, args=(metrics_port,), daemon=True)
    fake.start()
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "driftguard.toml"
        config.write_text(
            f"[scraping]\ninterval_seconds = {INTERVAL_SECONDS}\n"
            + "".join(
                f'[[sources]]\nserver = "server-{number}"\n'
                f'url = "http://127.1.{number // 250}.{1 + number % 250}:{metrics_port}/metrics"\n'
                for number in range(servers)
            )
        )
        command = [sys.executable, "-m", "driftguard", "serve", "--port", str(port), "--data-dir", directory]
        sidecar = subprocess.Popen([*command, "--config", str(config)], stdout=subprocess.DEVNULL)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as client:
                wait_ready(client)
                time.sleep(warm_up_seconds)
                process = psutil.Process(sidecar.pid)
                before, begun = process.cpu_times(), time.monotonic()
                time.sleep(seconds)
                after, ended = process.cpu_times(), time.monotonic()
                conditions = [item["condition"] for item in client.get("/api/v1/status").json()["sources"]]
                assert conditions == ["reporting"] * servers, conditions
                used = after.user + after.system - before.user - before.system
                return used / (ended - begun), process.memory_info().rss / 2**20
        finally:
            sidecar.terminate()
            sidecar.wait(30)
            fake.terminate()


def serve(port: int) -> None:
    """Any address is a server of its own, each step of which is one scrape further."""
    engines: dict[str, FakeVllm] = {}
    other = "".join(
        f'vllm:request_prefill_time_seconds_bucket{{engine="0",le="{number}",model_name="{MODEL}"}} 1.0\n'
        for number in range(OTHER_LINES)
    )

    async def app(scope, receive, send):  # type: ignore[no-untyped-def]
        engine = engines.setdefault(scope["server"][0], FakeVllm())
        engine.serve([4, 0, 3, 1] * 10)
        body = (other + engine.text()).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    uvicorn.run(app, host="0.0.0.0", port=port, log_level="warning", lifespan="off")


if __name__ == "__main__":
    main()
