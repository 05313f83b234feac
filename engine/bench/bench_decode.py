"""Tokens per second with speculation off and on, and what a target and a draft forward cost.

    python engine/bench/bench_decode.py [--target DIR --draft DIR] [--concurrency 1 2 4 8] [--temperature 0 1]

Prompts are cut from Python code that the bundled models were not trained on; --prompts FILE gives others, as
JSON Lines with "prompt_token_ids" (the traffic format of driftguard_training).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import Request, SamplingParams
from driftguard_engine.engine import Engine
from driftguard_engine.kv_cache import Span
from driftguard_engine.models.base import TokenModel
from driftguard_engine.models.loading import Placement, load
from driftguard_training import corpus
from transformers import PreTrainedTokenizerBase

_PROMPTS = 64
_REPEATS = 60  # of a forward pass


def main() -> None:
    options = _options()
    config = EngineConfig(
        target=options.target,
        draft=options.draft,
        max_batch=max(options.concurrency),
        num_speculative_tokens=options.num_speculative_tokens,
        threads=options.threads,
        model_path=options.model_path,
    )
    print(f"{_processor()}, {os.cpu_count()} cores, {options.threads} threads, torch {torch.__version__}")
    _print_forward_costs(config, options.context)
    engine = Engine(config)
    prompts = _prompts(options, engine.tokenizer)
    print("\ntemperature requests  off tok/s   on tok/s  speed-up acceptance")
    for temperature in options.temperature:
        for concurrency in options.concurrency:
            _compare(engine, prompts, concurrency, temperature, options)


def _compare(
    engine: Engine,
    prompts: list[list[int]],
    concurrency: int,
    temperature: float,
    options: argparse.Namespace,
) -> None:
    """Off and on alternate, so that a slow moment of the machine affects both; medians are printed."""
    speeds: dict[int, list[float]] = {0: [], options.num_speculative_tokens: []}
    drafted = accepted = 0
    for repeat in range(options.repeats):
        for k, seen in speeds.items():
            batch = [prompts[(repeat * concurrency + row) % len(prompts)] for row in range(concurrency)]
            speed, d, a = _serve(engine, batch, k, temperature, options.max_tokens)
            seen.append(speed)
            drafted, accepted = drafted + d, accepted + a
    off, on = (statistics.median(seen) for seen in speeds.values())
    rate = accepted / drafted if drafted else float("nan")
    print(f"{temperature:11.1f} {concurrency:8d} {off:10.0f} {on:10.0f} {on / off:8.2f}x {rate:10.3f}")


def _serve(
    engine: Engine, prompts: list[list[int]], k: int, temperature: float, max_tokens: int
) -> tuple[float, int, int]:
    """Output tokens per second of decoding (prompts are read before the clock starts), drafted, accepted."""
    for row, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=row,
            num_speculative_tokens=k,
            ignore_eos=True,
        )
        engine.submit(Request(f"r{row}", tuple(prompt), params, datetime.now(UTC)))
    started, early, received = set[str](), 0, 0
    while len(started) < len(prompts):
        outputs = engine.step()
        started |= {output.request_id for output in outputs}
        early += sum(len(output.token_ids) for output in outputs)
    begin, done = time.perf_counter(), []
    while engine.has_work():
        outputs = engine.step()
        received += sum(len(output.token_ids) for output in outputs)
        done += [output.finished.counts for output in outputs if output.finished is not None]
    seconds = time.perf_counter() - begin
    return received / seconds, sum(each.drafted for each in done), sum(each.accepted for each in done)


def _print_forward_costs(config: EngineConfig, context: int) -> None:
    placement = Placement(
        torch.float32, torch.device("cpu"), config.max_batch, config.max_length, config.model_path == "auto"
    )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    k = config.num_speculative_tokens
    print(f"\nmicroseconds per forward at context {context} (median)")
    print(f" rows  target, 1 token  target, {k + 1} tokens  draft, 1 token")
    target = load(config.target, placement, field="target").model
    draft = load(str(config.draft), placement, field="draft").model
    for rows in (1, 2, 4, 8):
        if rows <= config.max_batch:
            costs = (
                _forward(target, rows, 1, context),
                _forward(target, rows, k + 1, context),
                _forward(draft, rows, 1, context),
            )
            print("{:5d} {:16.0f} {:17.0f} {:15.0f}".format(rows, *costs))


def _forward(model: TokenModel, rows: int, count: int, context: int) -> float:
    spans = [Span(row, context, count) for row in range(rows)]
    return _median_microseconds(lambda: model.forward([1] * (rows * count), spans))


def _median_microseconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def _prompts(options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    if options.prompts:
        lines = Path(options.prompts).read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["prompt_token_ids"][: options.context] for line in lines if line.strip()]
    texts = corpus.prompts("python", _PROMPTS, seed=0, characters=8 * options.context)
    return [tokenizer.encode(text)[: options.context] for text in texts]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _options() -> argparse.Namespace:
    bundled = Path(__file__).parents[1] / "driftguard_engine" / "bundled"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=str(bundled / "target"))
    parser.add_argument("--draft", default=str(bundled / "draft"))
    parser.add_argument("--prompts", help="JSON Lines with prompt_token_ids")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--context", type=int, default=64, help="prompt tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model-path", choices=("auto", "generic"), default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    main()
