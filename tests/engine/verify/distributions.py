"""What verification must do, worked out by hand: exact distributions, and the checkers that compare.

Nothing here shares code with the engine, except that drafts are drawn by whatever sampler is tested.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from driftguard_engine.kernels.reference.verify import Rule, singles
from driftguard_engine.kernels.tensor_checks import checked_sampling, expect_distributions
from driftguard_engine.verify import VerifyResult, verification_of, verify_chain
from scipy import stats
from torch import Tensor

ALPHA = 1e-4  # probability that a correct verifier fails a check; with fixed seeds it fails always or never
Verifier = Callable[..., VerifyResult]
Sampler = Callable[..., Tensor]
Distribution = dict[tuple[int, ...], float]


@dataclass(frozen=True)
class Scenario:
    """A draft and a target whose next token depends on the one before, on a small vocabulary."""

    target: Tensor  # [K+1, V, V]: logits at step i after token x (at step 0 after token 0)
    draft: Tensor  # [K, V, V]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def drafted(self) -> int:
        return len(self.draft)

    @property
    def size(self) -> int:
        return self.target.shape[-1]


def scenario(
    size: int, drafted: int, seed: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Scenario:
    random = torch.Generator().manual_seed(seed)
    target = 1.2 * torch.randn(drafted + 1, size, size, generator=random)
    draft = target[:-1] + torch.randn(drafted, size, size, generator=random)
    return Scenario(target, draft, temperature, top_k, top_p)


def distribution_of(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Temperature, then top-k, then top-p, as one would write it on paper. Equal logits: lower id first."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if temperature == 0:
        return [float(token == order[0]) for token in range(len(logits))]
    weight = [math.exp((logit - logits[order[0]]) / temperature) for logit in logits]
    if 0 < top_k < len(logits):
        order = order[:top_k]
    if top_p < 1:
        total = math.fsum(weight[token] for token in order)
        before = [math.fsum(weight[token] for token in order[:place]) for place in range(len(order))]
        order = [
            token for token, held in zip(order, before, strict=True) if held == 0 or held < top_p * total
        ]
    total = math.fsum(weight[token] for token in order)
    return [weight[token] / total if token in order else 0.0 for token in range(len(logits))]


Table = list[list[list[float]]]  # [step][token before][token]


def tables_of(case: Scenario) -> tuple[Table, Table]:
    """Probabilities of target and draft."""
    shaping = case.temperature, case.top_k, case.top_p
    p, q = (
        [[distribution_of(row.tolist(), *shaping) for row in step] for step in table]
        for table in (case.target, case.draft)
    )
    return p, q


def exact_distribution(case: Scenario, length: int, rule: Rule = "token") -> Distribution:
    """P(emitted tokens) when `length` drafts are offered; their number tells how many were accepted."""
    p, q = tables_of(case)
    distribution = _by_block(p, q, length) if rule == "block" else _by_token(case, p, q, length)
    assert math.isclose(math.fsum(distribution.values()), 1, abs_tol=1e-9)
    return distribution


def _by_token(case: Scenario, p: Table, q: Table, length: int) -> Distribution:
    """Token y after accepted x_1..x_a has probability prod min(p, q)(x_i) times (p - q)+(y), or times p(y)
    after the last draft: (p - q)+ sums to exactly the probability of a rejection.
    """
    distribution: Distribution = {}
    for accepted in range(length + 1):
        for prefix in itertools.product(range(case.size), repeat=accepted):
            chance, before = 1.0, 0
            for step, token in enumerate(prefix):
                chance *= min(p[step][before][token], q[step][before][token])
                before = token
            for token in range(case.size):
                own = p[accepted][before][token]
                if accepted < length:
                    own = max(own - q[accepted][before][token], 0.0)
                distribution[(*prefix, token)] = chance * own
    return distribution


def _by_block(p: Table, q: Table, length: int) -> Distribution:
    """Algorithm 2 of Sun et al. (2025), followed to the letter for every block that the draft may draw."""
    size = len(p[0])
    distribution: Distribution = dict.fromkeys(
        itertools.chain.from_iterable(
            itertools.product(range(size), repeat=count + 1) for count in range(length + 1)
        ),
        0.0,
    )
    for block in itertools.product(range(size), repeat=length):
        before = (0, *block)
        drawn = math.prod(q[step][before[step]][token] for step, token in enumerate(block))
        if drawn == 0:
            continue
        ratio = [1.0]
        for step, token in enumerate(block):
            ratio.append(min(ratio[-1] * p[step][before[step]][token] / q[step][before[step]][token], 1.0))
        left = drawn  # the probability that no longer run is kept
        for kept in range(length, -1, -1):
            drafted = q[kept][before[kept]] if kept < length else [0.0] * size
            excess = [
                max(ratio[kept] * a - b, 0.0) for a, b in zip(p[kept][before[kept]], drafted, strict=True)
            ]
            total = math.fsum(excess)
            passes = 1.0 if kept == 0 else total / (total + 1 - ratio[kept] or 1)
            if total == 0:
                excess, total = p[kept][before[kept]], 1.0
            for token in range(size):
                distribution[(*block[:kept], token)] += left * passes * excess[token] / total
            left *= 1 - passes
    return distribution


def sample_draft(
    draft_logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    position: Tensor,
    step: int = 0,
    rule: Rule = "token",
) -> Tensor:
    """Draft token `step` of each row, int64 [B], as the engine draws it from draft_logits [B, V].

    position: of the first draft token. The rest as `verify_chain`.
    """
    (rows, size), device = draft_logits.shape, draft_logits.device
    sampling = checked_sampling(temperature, top_k, top_p, seed, rows, device)
    drafts, positions = step + 1, position.cpu().numpy()
    lengths = torch.full((rows,), drafts, dtype=torch.int32, device=device)
    drawing = verification_of(sampling, positions, lengths, drafts, size, draft_logits.dtype, rule=rule)
    drawing.draft_logits[:, step] = draft_logits
    drawing.draw(step)
    tokens = drawing.draft_tokens[:, step]
    if bool((tokens < 0).any()):
        expect_distributions("draft_logits", singles(draft_logits), read=np.ones(rows, np.bool_))
    return tokens


BY_RULE: dict[Rule, tuple[Verifier, Sampler]] = {
    "token": (verify_chain, sample_draft),
    "block": (partial(verify_chain, rule="block"), partial(sample_draft, rule="block")),
}


def draw(
    case: Scenario,
    rows: int,
    seed: Tensor,
    position: Tensor,
    lengths: Tensor | None = None,
    verify: Verifier = verify_chain,
    sample: Sampler = sample_draft,
) -> VerifyResult:
    """Draft and verify `rows` times, drafting with the same seeds and positions as verifying."""
    shaping = (
        torch.full((rows,), case.temperature),
        torch.full((rows,), case.top_k),
        torch.full((rows,), case.top_p, dtype=torch.float64),
    )
    token = torch.zeros(rows, dtype=torch.int64)
    target_logits, draft_logits, tokens = [case.target[0, token]], [], []
    for step in range(case.drafted):
        draft_logits.append(case.draft[step, token])
        token = sample(draft_logits[-1], *shaping, seed, position, step)
        tokens.append(token)
        target_logits.append(case.target[step + 1, token])
    lengths = torch.full((rows,), case.drafted) if lengths is None else lengths
    return verify(
        torch.stack(target_logits, 1),
        torch.stack(draft_logits, 1),
        torch.stack(tokens, 1),
        lengths,
        *shaping,
        seed,
        position,
    )


def counts_of(result: VerifyResult) -> dict[tuple[int, ...], int]:
    """How often each run of tokens was emitted; refuses results that contradict themselves."""
    assert torch.equal(result.emitted, result.accepted + 1)
    assert torch.equal((result.tokens >= 0).sum(1), result.emitted)
    return {
        tuple(token for token in run if token >= 0): count for run, count in runs_of(result.tokens).items()
    }


def runs_of(tokens: Tensor) -> dict[tuple[int, ...], int]:
    """How often each row of [B, S] occurs; tokens from -1 on."""
    base = int(tokens.max()) + 2
    places = base ** torch.arange(tokens.shape[1])
    assert base ** tokens.shape[1] < 2**63
    codes, counts = np.unique(((tokens + 1) * places).sum(1).numpy(), return_counts=True)
    runs = (torch.from_numpy(codes).unsqueeze(1) // places) % base - 1
    return dict(zip(map(tuple, runs.tolist()), counts.tolist(), strict=True))


def assert_distribution(counts: dict[tuple[int, ...], int], distribution: Distribution, context: str) -> None:
    """Chi-square goodness of fit; cells that expect fewer than ten are taken together.

    Fails on p < ALPHA, and on any outcome that the distribution rules out.
    """
    impossible = [run for run in counts if distribution.get(run, 0.0) == 0.0]
    assert not impossible, f"{context}: the distribution rules out {impossible[:5]}"
    total = sum(counts.values())
    observed = np.array([counts.get(run, 0) for run in distribution], dtype=float)
    expected = np.array(list(distribution.values())) * total
    rare = expected < 10
    if expected[rare].sum() >= 10:
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    else:  # too few to test on their own: added to the smallest of the others
        smallest = np.flatnonzero(~rare)[np.argmin(expected[~rare])]
        observed[smallest] += observed[rare].sum()
        expected[smallest] += expected[rare].sum()
        observed, expected = observed[~rare], expected[~rare]
    if len(observed) == 1:  # one outcome is certain, and only it was seen
        return
    fit = stats.chisquare(observed, expected * (total / expected.sum()))
    assert fit.pvalue > ALPHA, (
        f"{context}: chi-square {fit.statistic:.1f} on {len(observed) - 1} df, p={fit.pvalue:.2g}"
    )


def assert_lossless(
    case: Scenario,
    *,
    rows: int,
    seed: int,
    rule: Rule = "token",
    verify: Verifier | None = None,
    sample: Sampler | None = None,
) -> None:
    """The distribution of (accepted, tokens), and the first token's against the target's own, over `rows`.

    Half of the rows differ by seed alone, half by position alone. verify, sample: without them the engine's.
    """
    verify, sample = verify or BY_RULE[rule][0], sample or BY_RULE[rule][1]
    half = rows // 2
    one = torch.ones(half, dtype=torch.int64)
    index = torch.arange(half)
    seeds = torch.cat((index + (seed << 32), one * seed))
    positions = torch.cat((one * 17, index * (case.drafted + 1)))
    result = draw(case, len(seeds), seeds, positions, verify=verify, sample=sample)
    context = f"seed {seed}, {rows} rows"
    assert_distribution(
        counts_of(result), exact_distribution(case, case.drafted, rule), f"joint distribution, {context}"
    )

    first = result.tokens[:, 0].bincount(minlength=case.size).tolist()
    p = distribution_of(case.target[0, 0].tolist(), case.temperature, case.top_k, case.top_p)
    counted: dict[tuple[int, ...], int] = {(token,): count for token, count in enumerate(first) if count}
    assert_distribution(
        counted, {(token,): chance for token, chance in enumerate(p)}, f"first token, {context}"
    )


DistributionsFromLogits = Callable[[Tensor, float], Tensor]


def assert_precise(probabilities: DistributionsFromLogits, *, seed: int) -> None:
    """Probabilities of [B, V] logits at a temperature agree with the softmax in float64, token by token."""
    logits = 3 * torch.randn(4, 5000, generator=torch.Generator().manual_seed(seed))
    for temperature in (1.0, 0.7):
        exact = (logits.double() / temperature).softmax(-1)
        error = float(((probabilities(logits, temperature).double() - exact).abs() / exact).max())
        assert error < 1e-5, f"relative error {error:.2g} at temperature {temperature}, seed {seed}"
