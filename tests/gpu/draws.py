"""Millions of drafted and verified runs on a device, counted there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from driftguard_engine.kernels import verify as verify_kernels
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.reference.sampling import SamplingBatch
from driftguard_engine.kernels.verify import SamplingTensors, Workspace
from torch import Tensor

from tests.engine.kernels.cases import Laws
from tests.engine.verify.distributions import (
    Distribution,
    Scenario,
    assert_distribution,
    distribution_of,
    exact_distribution,
)

Counts = dict[tuple[int, ...], int]
CHUNK = 2**18  # runs at a time


@dataclass(frozen=True)
class Drafted:
    """What was drafted, and what verification is told of it: a mistake is planted by changing this."""

    launcher: Launcher
    target: Tensor  # [B, K + 1, V]
    draft: Tensor | None  # [B, K, V]
    lengths: Tensor
    settings: SamplingTensors
    space: Workspace

    def verify(self) -> None:
        verify_kernels.verify(self.launcher, self.target, self.draft, self.lengths, self.settings, self.space)


Mistake = Callable[[Drafted], Drafted]


@dataclass(frozen=True)
class Counted:
    runs: Counts  # emitted tokens
    pairs: Counts  # first tokens of neighbouring slots
    total: int


def count(
    launcher: Launcher,
    device: torch.device,
    scenario: Scenario,
    total: int,
    seed: int,
    mistake: Mistake | None = None,
    chunk: int = CHUNK,
) -> Counted:
    """Half of the runs differ by seed alone, half by position alone, as in `assert_lossless`."""
    chunk = min(chunk, total // 2)
    space = Workspace.empty(chunk, scenario.drafted, scenario.size, device)
    settings = _settings(scenario, chunk, device)
    base, steps = scenario.size + 1, scenario.drafted + 1
    places = base ** torch.arange(steps, device=device)
    runs = torch.zeros(base**steps, dtype=torch.int64, device=device)
    pairs = torch.zeros(scenario.size**2, dtype=torch.int64, device=device)
    index, one = torch.arange(chunk, device=device), torch.ones(chunk, dtype=torch.int64, device=device)
    done = 0
    for start in range(0, total // 2, chunk):
        for seeds, positions in (
            (index + start + (seed << 32), one * 17),
            (one * seed, (index + start) * steps),
        ):
            drafted = _draft(
                launcher, scenario, replace(settings, seed=seeds, position=positions), space, device
            )
            (mistake(drafted) if mistake else drafted).verify()
            tokens = space.tokens
            assert bool(((tokens >= 0).sum(1) == space.accepted + 1).all())
            runs += torch.bincount(((tokens + 1) * places).sum(1), minlength=base**steps)
            first = tokens[: chunk // 2 * 2, 0].view(-1, 2)
            pairs += torch.bincount(first[:, 0] * scenario.size + first[:, 1], minlength=scenario.size**2)
            done += chunk
    return Counted(_runs(runs, base, steps), _pairs(pairs, scenario.size), done)


def assert_lossless(counted: Counted, scenario: Scenario, context: str) -> None:
    """Joint distribution of (accepted, tokens), of the first token, of the length, of neighbouring slots."""
    context = f"{context}, {counted.total:,} runs"
    distribution = exact_distribution(scenario, scenario.drafted)
    assert_distribution(counted.runs, distribution, f"joint distribution, {context}")
    assert_distribution(
        _sum_by(counted.runs, len), _sum_distribution_by(distribution, len), f"accepted length, {context}"
    )
    p = distribution_of(scenario.target[0, 0].tolist(), scenario.temperature, scenario.top_k, scenario.top_p)
    first = _sum_by(counted.runs, lambda run: run[0])
    assert_distribution(
        first, {(token,): chance for token, chance in enumerate(p)}, f"first token, {context}"
    )
    both: Distribution = {(a, b): p[a] * p[b] for a in range(len(p)) for b in range(len(p))}
    assert_distribution(counted.pairs, both, f"neighbouring slots, {context}")


def probabilities(launcher: Launcher, device: torch.device, logits: Tensor, temperature: float) -> Tensor:
    """[B, V] on the CPU, by the tiles that the kernels sum."""
    rows, size = logits.shape
    scenario = Scenario(logits[:1], logits[:0], temperature)
    settings, space = _settings(scenario, rows, device), Workspace.empty(rows, 0, size, device)
    there = logits.to(device).unsqueeze(1)
    verify_kernels.find_distributions(launcher, there, None, settings, space.target, 1, 0, space.meetings)
    found = Laws.of(space.target, torch.arange(rows), settings.scale.cpu())
    powers = (logits.double() - found.peak.double().unsqueeze(1)) * settings.scale.double().cpu().unsqueeze(1)
    return powers.exp2() / found.normaliser.unsqueeze(1)


def _settings(scenario: Scenario, rows: int, device: torch.device) -> SamplingTensors:
    nothing = torch.zeros(rows, dtype=torch.int64)
    sampling = SamplingBatch.of(
        torch.full((rows,), scenario.temperature),
        torch.full((rows,), scenario.top_k),
        torch.full((rows,), scenario.top_p, dtype=torch.float64),
        nothing,
    )
    return SamplingTensors.of(sampling, nothing.numpy(), scenario.size, device)


def _draft(
    launcher: Launcher, scenario: Scenario, settings: SamplingTensors, space: Workspace, device: torch.device
) -> Drafted:
    rows = len(settings.seed)
    token = torch.zeros(rows, dtype=torch.int64, device=device)
    target, draft = [scenario.target[0].to(device)[token]], []
    for step in range(scenario.drafted):
        draft.append(scenario.draft[step].to(device)[token])
        verify_kernels.draw_drafts(launcher, draft[-1], settings, space, step)
        token = space.draft_tokens[:, step].clone()
        target.append(scenario.target[step + 1].to(device)[token])
    lengths = torch.full((rows,), scenario.drafted, dtype=torch.int32, device=device)
    return Drafted(launcher, torch.stack(target, 1), torch.stack(draft, 1), lengths, settings, space)


def _runs(cells: Tensor, base: int, steps: int) -> Counts:
    found: Counts = {}
    for code in cells.nonzero().squeeze(1).tolist():
        digits = [code // base**step % base - 1 for step in range(steps)]
        found[tuple(digit for digit in digits if digit >= 0)] = int(cells[code])
    return found


def _pairs(cells: Tensor, size: int) -> Counts:
    return {divmod(code, size): number for code, number in enumerate(cells.tolist()) if number}


def _sum_by(counts: Counts, key: Callable[[tuple[int, ...]], int]) -> Counts:
    found: Counts = {}
    for run, number in counts.items():
        found[(key(run),)] = found.get((key(run),), 0) + number
    return found


def _sum_distribution_by(distribution: Distribution, key: Callable[[tuple[int, ...]], int]) -> Distribution:
    found: Distribution = {}
    for run, chance in distribution.items():
        found[(key(run),)] = found.get((key(run),), 0.0) + chance
    return found
