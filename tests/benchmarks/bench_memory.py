"""Resident memory of the sidecar, without torch: at rest, and after records of several streams.

python -m tests.benchmarks.bench_memory [--records N]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import uuid
from datetime import UTC, datetime

import httpx
import psutil

from driftguard.demo.processes import free_port

STREAMS, SEGMENTS, BATCH = 8, 8, 500
READY_SECONDS = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=50_000)
    records = parser.parse_args().records
    port = free_port()
    with tempfile.TemporaryDirectory() as data_dir:
        command = [sys.executable, "-m", "driftguard", "serve", "--port", str(port), "--data-dir", data_dir]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as client:
                wait_ready(client)
                print(f"at rest: {_resident_mb(process.pid):.0f} MB resident")
                _send(client, records)
                _wait_folded(client)
            loaded = psutil.Process(process.pid)
            print(
                f"after {records} records of {STREAMS} streams: {_resident_mb(process.pid):.0f} MB resident"
            )
            maps = [item.path for item in loaded.memory_maps()]
            print(f"torch loaded: {any('libtorch' in path for path in maps)}")
        finally:
            process.terminate()
            process.wait(30)


def wait_ready(client: httpx.Client) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        try:
            if client.get("/readyz").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise SystemExit("the sidecar did not become ready")


def _send(client: httpx.Client, records: int) -> None:
    rng = random.Random(1)
    for _ in range(records // BATCH):
        body = "\n".join(json.dumps(_record(rng)) for _ in range(BATCH))
        client.post("/api/v1/records", content=body).raise_for_status()


def _record(rng: random.Random) -> dict[str, object]:
    now = datetime.now(UTC).isoformat()
    accepted = rng.randint(80, 160)
    return {
        "record_id": str(uuid.UUID(int=rng.getrandbits(128))),
        "kind": "request",
        "fidelity": "request",
        "started_at": now,
        "ended_at": now,
        "server": f"server-{rng.randrange(STREAMS)}",
        "target": "t",
        "draft": "d",
        "draft_version": "1",
        "method": "draft_model",
        "segment": f"segment-{rng.randrange(SEGMENTS)}",
        "time_per_output_token_seconds": 0.01,
        "steps": 50,
        "drafted": 200,
        "accepted": accepted,
        "emitted": accepted + 50,
    }


def _wait_folded(client: httpx.Client) -> None:
    while client.get("/readyz").json()["fold_lag_records"]:
        time.sleep(0.2)


def _resident_mb(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss) / 1e6


if __name__ == "__main__":
    main()
