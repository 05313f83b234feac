"""Tokens per second with adaptive K, against no speculation and a fixed K, with a good and a bad draft.

    python engine/bench/bench_adaptive_k.py [--concurrency 1 2 4 8 16] [--drafts bad] [--clock processor]

Off, fixed and adaptive alternate, so that a slow moment of the machine affects all three. Ratios are taken
within one round; their median is printed. Adaptive K has learned before the first round. On a machine with
other load, the CPU time of the thread (--clock processor) is more reliable than wall-clock time; adaptive K
itself always uses the latter. The bad draft has the good one's shape and random weights. Prompts are cut from
Python code that the bundled models were not trained on.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import Request, SamplingParams
from driftguard_engine.engine import Engine
from driftguard_training import corpus
from transformers import AutoConfig, AutoModelForCausalLM

_BUNDLED = Path(__file__).parents[1] / "driftguard_engine" / "bundled"
_CHARACTERS_PER_TOKEN = 8  # at most
_CLOCKS = {"wall": time.perf_counter, "processor": time.thread_time}


def main() -> None:
    options = _options()
    print(f"{os.cpu_count()} cores, {options.threads} threads, torch {torch.__version__}, K <= {options.k}")
    print("draft requests  off tok/s  fixed/off  adaptive/off  lowest  acceptance  K  reason")
    with tempfile.TemporaryDirectory() as directory:
        bad = _with_random_weights(Path(options.draft), Path(directory) / "bad")
        for name in options.drafts:
            for concurrency in options.concurrency:
                _compare(name, str(bad) if name == "bad" else options.draft, concurrency, options)


def _compare(name: str, draft: str, concurrency: int, options: argparse.Namespace) -> None:
    fixed, adaptive = (_engine(draft, concurrency, adaptive, options) for adaptive in (False, True))
    prompts = _prompts(fixed, options)
    runs = ((fixed, 0), (fixed, options.k), (adaptive, options.k))
    for engine, k in (*runs, *[runs[-1]] * options.learning_rounds):
        _serve(engine, prompts[:concurrency], k, options)
    speeds = [
        [_serve(engine, _batch(prompts, round_, concurrency), k, options) for engine, k in runs]
        for round_ in range(options.rounds)
    ]
    fixed_ratios = [with_fixed / off for off, with_fixed, _ in speeds]
    ratios = [chosen / off for off, _, chosen in speeds]
    decision = adaptive.drafting.decision
    print(
        f"{name:5s} {concurrency:8d} {statistics.median(off for off, _, _ in speeds):10.0f}"
        f" {statistics.median(fixed_ratios):9.2f}x {statistics.median(ratios):12.2f}x {min(ratios):6.2f}x"
        f" {decision.acceptance:11.2f} {decision.num_speculative_tokens:2d}  {_usual_reason(adaptive)}",
        flush=True,
    )


def _usual_reason(engine: Engine) -> str:
    return max(engine.drafting.reasons, key=lambda reason: engine.drafting.reasons[reason])


def _engine(draft: str, concurrency: int, adaptive: bool, options: argparse.Namespace) -> Engine:
    return Engine(
        EngineConfig(
            target=options.target,
            draft=draft,
            max_batch=concurrency,
            max_length=options.context + options.max_tokens + options.k + 1,
            num_speculative_tokens=options.k,
            adaptive_k=adaptive,
            threads=options.threads,
        )
    )


def _serve(engine: Engine, prompts: list[list[int]], k: int, options: argparse.Namespace) -> float:
    """Output tokens per second of decoding: prompts are read before the clock starts."""
    for row, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=options.max_tokens, temperature=0.0, num_speculative_tokens=k, ignore_eos=True
        )
        engine.submit(Request(f"r{row}", tuple(prompt), params, datetime.now(UTC)))
    started, received = set[str](), 0
    while len(started) < len(prompts):
        started |= {output.request_id for output in engine.step()}
    clock = _CLOCKS[options.clock]
    begin = clock()
    while engine.has_work():
        received += sum(len(output.token_ids) for output in engine.step())
    return received / (clock() - begin)


def _prompts(engine: Engine, options: argparse.Namespace) -> list[list[int]]:
    characters = _CHARACTERS_PER_TOKEN * options.context
    texts = corpus.prompts("python", 4 * max(options.concurrency), seed=0, characters=characters)
    return [engine.tokenizer.encode(text)[: options.context] for text in texts]


def _batch(prompts: list[list[int]], round_: int, size: int) -> list[list[int]]:
    return [prompts[(round_ * size + row) % len(prompts)] for row in range(size)]


def _with_random_weights(draft: Path, directory: Path) -> Path:
    """A draft of the same shape and tokenizer: it costs the same, and is hardly ever accepted."""
    shutil.copytree(draft, directory)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(draft))  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    return directory


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=str(_BUNDLED / "target"))
    parser.add_argument("--draft", default=str(_BUNDLED / "draft"))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--drafts", nargs="+", choices=("good", "bad"), default=["good", "bad"])
    parser.add_argument("--clock", choices=tuple(_CLOCKS), default="wall")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--context", type=int, default=32, help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--learning-rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
