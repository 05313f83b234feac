"""What the screenshots show: the loop of `driftguard demo`, played by a real engine and sidecar, beside
servers whose traffic is drawn; a real Prometheus scrapes it all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from uuid import UUID

import httpx
import numpy as np
from rich.console import Console

from driftguard.cost import TimedRequest
from driftguard.demo.processes import free_url, sidecar_config, start_engine, start_sidecar
from driftguard.demo.receiver import Receiver
from driftguard.demo.run import START_SECONDS, STORY
from driftguard.demo.scenes import OF_MODELS
from driftguard.demo.sidecar_client import SidecarClient
from driftguard.demo.stages import Facts, Loop
from driftguard.demo.traffic import Load, Traffic
from driftguard.demo.view import Screen
from driftguard.records import AcceptanceRecord
from tests.adapters.fake_engines import FakeVllm
from tests.cost.traffic import Server, told
from tests.integration.servers import running_prometheus
from tests.pipeline.sidecar import post
from tests.sources.served import ok, served

SEED: Final = 7
SETTLE_SECONDS: Final = 20.0  # at the end, so that the last of it is folded, scraped and rated
KNOWN: Final = Server(a=0.020, b=0.003, accepts=(0.88, 0.86, 0.84, 0.82))
FALLEN: Final = Server(a=0.020, b=0.003, accepts=(0.55, 0.45, 0.4, 0.4))
SEGMENTS: Final = ("code", "english", "german")
# One with metrics of vLLM's form, and one that does not answer.
SOURCES: Final = """
[[sources]]
server = "chat-us-1"
url = "{vllm_url}"
draft_version = "v1"
method = "eagle3"
[[sources]]
server = "batch-2"
kind = "vllm"
url = "http://127.0.0.1:9/metrics"
[scraping]
interval_seconds = 2
"""


@dataclass(frozen=True, slots=True)
class Recording:
    """The times of the recording, in Unix seconds. Prometheus' data is in the same directory."""

    start: float
    end: float


def record(directory: Path) -> Recording:
    """Plays the scene, which takes minutes on two cores. Raises DemoFailed where a stage does not happen."""
    print(f"seed {SEED}")
    with ExitStack() as stack:
        vllm = FakeVllm()
        page = stack.enter_context(served({"/metrics": ok(vllm.text)}))
        receiver, engine_url, sidecar_url = Receiver(), free_url(), free_url()
        stack.callback(receiver.close)
        config = sidecar_config(directory, engine_url, sidecar_url, [receiver.url], [])
        sidecar = start_sidecar(directory, sidecar_url, config + SOURCES.format(vllm_url=page.url))
        stack.callback(sidecar.stop)
        engine = start_engine(directory, engine_url, sidecar_url)
        stack.callback(engine.stop)
        engine.wait_ready(f"{engine_url}/health", START_SECONDS)
        sidecar.wait_ready(f"{sidecar_url}/readyz", START_SECONDS)
        prometheus = directory / "prometheus"
        prometheus.mkdir()
        stack.enter_context(running_prometheus(prometheus, [sidecar_url, engine_url]))
        start = time.time()
        _play(engine_url, sidecar_url, receiver, Others(sidecar_url, vllm))
        return Recording(start, time.time())


def _play(engine_url: str, sidecar_url: str, receiver: Receiver, others: Others) -> None:
    """The stages of the demo. The other servers get traffic only after its incident was paged."""
    traffic = Traffic(engine_url, Load(OF_MODELS.weights, OF_MODELS.known), SEED)
    traffic.prepare(("python", "prose", "headers"))
    screen = Screen(Console())
    loop = Loop(screen, traffic, SidecarClient(sidecar_url), receiver, None, Facts(seed=SEED))
    with ExitStack() as stack:
        stack.callback(traffic.stop)
        for name, title, play in STORY:
            if name == "retrain":
                stack.enter_context(others.serving())
            with screen.stage(name, title) as stage:
                loop.facts.stages[name] = play(loop, stage)
        time.sleep(SETTLE_SECONDS)


class Others:
    """chat-eu-1 sends a record per request, and accepts less German after a while; a vLLM is scraped."""

    REQUESTS_PER_SECOND = 24
    FALL_AFTER_SECONDS = 90.0

    def __init__(self, sidecar_url: str, vllm: FakeVllm) -> None:
        self._client = httpx.Client(base_url=sidecar_url, timeout=30.0)
        self._vllm = vllm
        self._random = np.random.default_rng(SEED)
        self._stopped = threading.Event()

    @contextmanager
    def serving(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="other servers")
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join()
            self._client.close()

    def _run(self) -> None:
        start = last = time.time()
        number = 0
        while not self._stopped.wait(1.0):
            now = time.time()
            count = round((now - last) * self.REQUESTS_PER_SECOND)
            fallen = now - start > self.FALL_AFTER_SECONDS
            records = [
                self._request(number + i, last + (now - last) * (i + 1) / count, fallen=fallen)
                for i in range(count)
            ]
            post(self._client, records)
            self._vllm.serve(self._random.binomial(4, 0.7, 20 * count).tolist(), count)
            number, last = number + count, now

    def _request(self, number: int, at: float, *, fallen: bool) -> AcceptanceRecord:
        """Some with K = 2 and some without speculation, so that its cost is known."""
        k = {7: 2, 16: 0}.get(number % 25, 4)
        segment = SEGMENTS[number % len(SEGMENTS)]
        server = FALLEN if fallen and segment == "german" else KNOWN
        (drawn,) = server.serve(self._random, 1, k, segment=segment, start=at)
        record_id = UUID(bytes=self._random.bytes(16))
        return record_of(drawn, k, record_id, "chat-eu-1", _moment(at - 2.0), _moment(at))


def record_of(
    drawn: TimedRequest, k: int, record_id: UUID, server: str, started_at: datetime, ended_at: datetime
) -> AcceptanceRecord:
    """k: draft tokens per step; 0: without speculation."""
    return AcceptanceRecord(
        record_id=record_id,
        kind="request",
        server=server,
        target="Qwen3-32B",
        draft="Qwen3-0.6B" if k else "none",
        draft_version="v1" if k else "none",
        method="draft_model" if k else "none",
        fidelity="request",
        **{**told(drawn), "started_at": started_at, "ended_at": ended_at},
    )


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
