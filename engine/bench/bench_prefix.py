"""Time to first token of a prompt whose beginning is new, and of one that begins like the one before.

    python engine/bench/bench_prefix.py [--target DIR --draft DIR] [--shared 1000] [--own 12]

Both times are measured in turn, in the same engine, so that a slow moment of the machine affects both.
"""

from __future__ import annotations

import argparse
import random
import statistics
from datetime import UTC, datetime
from pathlib import Path

import torch
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import Request, SamplingParams
from driftguard_engine.engine import Engine

SEED = 20283


def main() -> None:
    options = _options()
    engine = Engine(
        EngineConfig(options.target, options.draft, device=options.device, threads=options.threads)
    )
    rng = random.Random(SEED)
    print(f"torch {torch.__version__}, {options.device}, {options.threads} threads")
    new, known, reused = [], [], 0
    for repeat in range(options.repeats + 1):
        shared = _tokens(rng, options.shared)
        first, _ = _first_token(engine, shared + _tokens(rng, options.own))
        second, reused = _first_token(engine, shared + _tokens(rng, options.own))
        if repeat:  # the first one warms up
            new.append(first * 1000)
            known.append(second * 1000)
    ratios = [first / second for first, second in zip(new, known, strict=True)]
    print(f"{options.shared} tokens shared, {options.own} of its own; {reused} reused")
    print(
        f"time to first token: new {statistics.median(new):.1f} ms, known {statistics.median(known):.1f} ms"
    )
    print(
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), {len(ratios)} pairs"
    )


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, 256) for _ in range(count)]


def _first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds, and how many of the prompt's tokens were reused."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    engine.submit(Request("r", tuple(prompt), params, datetime.now(UTC)))
    while engine.has_work():
        for output in engine.step():
            if output.finished is not None and output.finished.time_to_first_token_seconds is not None:
                return output.finished.time_to_first_token_seconds, output.finished.reused_prompt_tokens
    raise RuntimeError("the request ended without a token")


def _options() -> argparse.Namespace:
    bundled = Path(__file__).parents[1] / "driftguard_engine" / "bundled"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=str(bundled / "target"))
    parser.add_argument("--draft", default=str(bundled / "draft"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shared", type=int, default=1000)
    parser.add_argument("--own", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=9)
    return parser.parse_args()


if __name__ == "__main__":
    main()
