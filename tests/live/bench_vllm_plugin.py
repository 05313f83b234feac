"""What the plugin costs vLLM: tokens per second with it and without, in turns, and their ratio.

`python -m tests.live.bench_vllm_plugin [--rounds N]`. Two servers, of which one is asked at a time; the
sidecar of the plugin takes records on the same machine, as it would not where speed matters.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from driftguard.store.database import upgrade
from driftguard.store.embedded import start_embedded
from tests.live import clients
from tests.live.processes import sidecar
from tests.live.servers import DRAFT, Engine, running, speculative_config, vllm_server

REQUESTS = 48
TOKENS = 64


def tokens_per_second(engine: Engine, seed: int) -> float:
    def ask(url: str, prompt: str, rng: random.Random) -> int:
        answer = clients.completion(url, prompt, rng, max_tokens=TOKENS, temperature=0.0)
        return int(answer.usage.completion_tokens)

    begun = time.perf_counter()
    tokens: int = sum(clients.all_of([ask], engine.url, REQUESTS, seed))
    return tokens / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(start_embedded(directory / "database"))
        upgrade(url)
        beside = stack.enter_context(sidecar(directory / "sidecar", url))
        (directory / "without").mkdir()
        plain = vllm_server(directory / "without", speculative_config(DRAFT))
        labels = ["--middleware", "driftguard_vllm.RequestLabels"]
        recorded = vllm_server(directory, speculative_config(DRAFT), *labels)
        recorded.environment = {**recorded.environment, "DRIFTGUARD_VLLM_SIDECAR": beside.url}
        for engine in (plain, recorded):
            stack.enter_context(running(engine))
            tokens_per_second(engine, seed=0)
        ratios = []
        for seed in range(1, rounds + 1):
            pair = [plain, recorded] if seed % 2 else [recorded, plain]
            speeds = {engine.url: tokens_per_second(engine, seed) for engine in pair}
            ratios.append(speeds[recorded.url] / speeds[plain.url])
            print(f"{speeds[plain.url]:.0f} without, {speeds[recorded.url]:.0f} with: {ratios[-1]:.3f}")
        quartiles = statistics.quantiles(ratios, n=4)
        print(
            f"median {statistics.median(ratios):.3f}, quartiles {quartiles[0]:.3f} to {quartiles[2]:.3f}, "
            f"{rounds} rounds of {REQUESTS} requests"
        )


if __name__ == "__main__":
    main()
