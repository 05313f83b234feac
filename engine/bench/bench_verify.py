"""Microseconds of one verification and one draft draw on the CPU, beside a plain softmax verifier.

    python engine/bench/bench_verify.py [--vocabulary 2048] [--batch 4] [--drafted 4] [--threads 1]

The plain verifier is the textbook loop over rows and steps with torch.softmax and torch.multinomial: no
filters, no reproducible noise. The ratio is its time over ours, measured on the same logits in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from driftguard_engine.kernels.tensor_checks import checked_sampling
from driftguard_engine.verify import verification_of, verify_chain
from torch import Tensor

_SECONDS = 0.5  # for which a call is repeated


def plain_verify(target_logits: Tensor, draft_logits: Tensor, draft_tokens: Tensor) -> list[list[int]]:
    """Accept, resample, bonus at temperature 1, row by row. Arguments as `verify_chain`."""
    p, q = target_logits.softmax(-1), draft_logits.softmax(-1)
    rows: list[list[int]] = []
    for row in range(len(p)):
        emitted: list[int] = []
        for step, token in enumerate(draft_tokens[row].tolist()):
            if float(torch.rand(())) * float(q[row, step, token]) >= float(p[row, step, token]):
                residual = (p[row, step] - q[row, step]).clamp(min=0)
                emitted.append(int(residual.multinomial(1)))
                break
            emitted.append(token)
        else:
            emitted.append(int(p[row, -1].multinomial(1)))
        rows.append(emitted)
    return rows


def microseconds(call: Callable[[], object]) -> float:
    """Median time of one call."""
    times: list[int] = []
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end or len(times) < 5:
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--drafted", type=int, default=4, help="draft tokens per row")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    batch, drafted, size = options.batch, options.drafted, options.vocabulary
    # The draft is the target with noise added, so that runs of every length are accepted.
    target = torch.randn(batch, drafted + 1, size) * 3
    draft = target[:, :-1] + torch.randn(batch, drafted, size) * 0.5
    tokens = draft.softmax(-1).flatten(0, 1).multinomial(1).reshape(batch, drafted)
    lengths = torch.full((batch,), drafted)
    seed, position = torch.arange(batch), torch.full((batch,), 100)
    one = torch.ones(batch, dtype=torch.int32)

    def sampling(
        temperature: float, top_k: int, top_p: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return (
            torch.full((batch,), temperature),
            torch.full((batch,), top_k),
            torch.full((batch,), top_p),
            seed,
            position,
        )

    plain = microseconds(lambda: plain_verify(target, draft, tokens))
    print(f"B={batch} K={drafted} V={size} threads={options.threads} float32, median microseconds per call")
    print(f"{'sampling':24}{'verify':>10}{'plain / verify':>16}{'draft draw':>12}")
    for name, settings in {
        "temperature 1": (1.0, 0, 1.0),
        "temperature 0.7": (0.7, 0, 1.0),
        "greedy": (0.0, 0, 1.0),
        "top-k 50": (1.0, 50, 1.0),
        "top-p 0.9": (1.0, 0, 0.9),
        "top-k 50, top-p 0.9": (1.0, 50, 0.9),
    }.items():
        arguments = sampling(*settings)
        verify = microseconds(lambda: verify_chain(target, draft, tokens, lengths, *arguments))  # noqa: B023
        asked = checked_sampling(*arguments[:4], batch, draft.device)

        def draw_once() -> None:
            step = verification_of(asked, position.numpy(), one, 1, size, draft.dtype)  # noqa: B023
            step.draft_logits[:, 0] = draft[:, 0]
            step.draw(0)

        draw = microseconds(draw_once)
        print(f"{name:24}{verify:10.0f}{plain / verify:16.1f}{draw:12.0f}")
    print(f"{'plain, temperature 1':24}{plain:10.0f}")


if __name__ == "__main__":
    main()
