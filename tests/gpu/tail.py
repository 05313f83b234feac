"""A vocabulary of 150,000 whose first fifty tokens hold nine tenths: is the rest drawn as it should be?"""

from __future__ import annotations

import torch
from driftguard_engine.kernels import verify as verify_kernels
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.reference.sampling import SamplingBatch
from driftguard_engine.kernels.verify import SamplingTensors, Workspace
from torch import Tensor

from tests.engine.verify.distributions import Distribution, assert_distribution

SIZE, HEAD, HEAD_MASS, BINS = 150_000, 50, 0.9, 100


def assert_tail_is_lossless(
    launcher: Launcher, device: torch.device, draws: int, seed: int, chunk: int = 2**14, size: int = SIZE
) -> None:
    """First tokens and bonus tokens, by the fifty head tokens and by a hundred equal parts of the tail.

    All rows read the same logits (a stride of zero), so that the draws and not the memory take the time.
    """
    chunk = min(chunk, draws)
    random = torch.Generator().manual_seed(seed)
    target, draft = _logits(size, random), _logits(size, random)
    distribution = _binned(target.double().softmax(0), size)
    space = Workspace.empty(chunk, 1, size, device)
    there, drafted = target.to(device).expand(chunk, 2, size), draft.to(device).expand(chunk, 1, size)
    one, none = torch.ones(chunk), torch.zeros(chunk, dtype=torch.int64)
    lengths = torch.ones(chunk, dtype=torch.int32, device=device)
    first, bonus = (torch.zeros(HEAD + BINS, dtype=torch.int64, device=device) for _ in range(2))
    for start in range(0, draws, chunk):
        seeds = torch.arange(start, start + chunk) + (seed << 32)
        settings = SamplingTensors.of(SamplingBatch.of(one, none, one, seeds), none.numpy(), size, device)
        verify_kernels.draw_drafts(launcher, drafted[:, 0], settings, space, 0)
        verify_kernels.verify(launcher, there, drafted, lengths, settings, space)
        first += torch.bincount(_bin(space.tokens[:, 0], size), minlength=HEAD + BINS)
        kept = space.tokens[space.accepted == 1, 1]
        bonus += torch.bincount(_bin(kept, size), minlength=HEAD + BINS)
    for name, cells in (("first tokens", first), ("bonus tokens", bonus)):
        counts: dict[tuple[int, ...], int] = {
            (part,): number for part, number in enumerate(cells.tolist()) if number
        }
        expected: Distribution = {(part,): chance for part, chance in enumerate(distribution.tolist())}
        assert_distribution(
            counts, expected, f"{name} of V={size}, {sum(counts.values()):,} draws, seed {seed}"
        )


def _logits(size: int, random: torch.Generator) -> Tensor:
    """float32 [V]: nine tenths on the head, spread unevenly on both sides."""
    head, tail = (torch.randn(number, generator=random) for number in (HEAD, size - HEAD))
    return torch.cat(
        (
            head - head.logsumexp(0) + torch.tensor(HEAD_MASS).log(),
            tail - tail.logsumexp(0) + torch.tensor(1 - HEAD_MASS).log(),
        )
    )


def _bin(tokens: Tensor, size: int) -> Tensor:
    """A head token by itself, a tail token by its part of the ids."""
    parts = HEAD + (tokens - HEAD) * BINS // (size - HEAD)
    return tokens.where(tokens < HEAD, parts)


def _binned(distribution: Tensor, size: int) -> Tensor:
    parts = _bin(torch.arange(size), size)
    return torch.zeros(HEAD + BINS, dtype=torch.float64).index_add_(0, parts, distribution)
