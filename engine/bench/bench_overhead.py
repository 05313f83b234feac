"""The cost of verification on the CPU, relative to one forward pass of the target. Goal: at most a tenth.

    python engine/bench/bench_overhead.py [--target DIR] [--batch 1 4 8] [--drafted 3] [--context 64]

The draws of a step's K drafts, the target's forward pass over K + 1 tokens of each row and the verification
follow one another as in the engine, so that each starts with the processor's caches as the one before left
them. CPU time is measured, so that other load hardly matters. The draws are printed apart from the
verification: they belong to drafting, with the distributions that they compute and the random numbers of the
step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from driftguard_engine.kernels.reference.sampling import SamplingBatch
from driftguard_engine.kernels.tensor_checks import checked_sampling
from driftguard_engine.kv_cache import Span
from driftguard_engine.models.base import TokenModel
from driftguard_engine.models.loading import Placement, load
from driftguard_engine.speculation import Verification
from driftguard_engine.verify import verification_of
from torch import Tensor

Result = TypeVar("Result")

REACH = 0.1
REPEATS = 60
_SAMPLINGS = {
    "greedy": (0.0, 0, 1.0),
    "temperature 1": (1.0, 0, 1.0),
    "top-k 50, top-p 0.9": (1.0, 50, 0.9),
}


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    length = options.context + options.drafted + 1
    placement = Placement(torch.float32, torch.device("cpu"), max(options.batch), length)
    target = load(options.target, placement, field="target").model
    print(f"K={options.drafted} V={target.vocabulary} threads={options.threads} float32, CPU time, medians")
    print(
        f"{'sampling':22}{'requests':>9}{'forward us':>12}{'verify us':>11}{'draws us':>10}{'of forward':>12}"
    )
    worst = 0.0
    for batch in options.batch:
        for name, sampling in _SAMPLINGS.items():
            forward, verify, draws = _costs(target, batch, options.drafted, options.context, sampling)
            worst = max(worst, verify / forward)
            print(f"{name:22}{batch:9d}{forward:12.0f}{verify:11.0f}{draws:10.0f}{verify / forward:12.1%}")
    verdict = "met" if worst <= REACH else "not met"
    print(f"verification is at most {worst:.1%} of a forward pass; at most {REACH:.0%}: {verdict}")


def _costs(
    target: TokenModel, batch: int, drafted: int, context: int, sampling: tuple[float, int, float]
) -> tuple[float, float, float]:
    """Microseconds of a forward pass, a verification, and the draws of all drafts."""
    spans = [Span(row, context, drafted + 1) for row in range(batch)]
    fed = torch.randint(target.vocabulary, (batch * (drafted + 1),)).tolist()
    logits = target.forward(fed, spans).view(batch, drafted + 1, -1)
    draft = logits[:, :-1] + 0.5 * torch.randn(batch, drafted, logits.shape[-1])
    temperature, top_k, top_p = (torch.full((batch,), value) for value in sampling)
    settings = checked_sampling(temperature, top_k, top_p, torch.arange(batch), batch, logits.device)
    times: list[tuple[float, float, float]] = []
    for _ in range(REPEATS):  # a slow moment of the machine affects all of them
        draws, step = _timed(lambda: _drawn(draft, settings))
        forward, _ = _timed(lambda: target.forward(fed, spans))
        verify, _ = _timed(lambda: step.verify(logits))  # noqa: B023
        times.append((forward, verify, draws))
    forward, verify, draws = (statistics.median(seen) for seen in zip(*times, strict=True))
    return forward, verify, draws


def _drawn(draft: Tensor, settings: SamplingBatch) -> Verification:
    batch, drafts, vocabulary = draft.shape
    positions, drafted = np.full(batch, 100), torch.full((batch,), drafts, dtype=torch.int32)
    step = verification_of(settings, positions, drafted, drafts, vocabulary, draft.dtype)
    for each in range(drafts):
        step.draft_logits[:, each] = draft[:, each]
        step.draw(each)
    return step


def _timed(call: Callable[[], Result]) -> tuple[float, Result]:
    """Microseconds of CPU time, and what the call returned."""
    begin = time.process_time()
    given = call()
    return 1e6 * (time.process_time() - begin), given


def _options() -> argparse.Namespace:
    bundled = Path(__file__).parents[1] / "driftguard_engine" / "bundled"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=str(bundled / "target"))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--drafted", type=int, default=3, help="draft tokens per row")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
