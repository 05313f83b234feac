"""The acceptance probability of speculative sampling, and the losses that raise it.

A token drafted from q is accepted against p with probability sum_v min(p(v), q(v)) = 1 - TV(p, q)
(Leviathan, Kalman, Matias 2023, "Fast Inference from Transformers via Speculative Decoding").
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from driftguard_training.settings import Loss

_LK_DECAY = 3.0


def distribution(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Probabilities [..., V] at `temperature`; temperature 0 is all mass on the argmax."""
    if temperature == 0:
        best = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    return torch.softmax(logits / temperature, dim=-1)


def acceptance_probability(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """sum_v min(p, q): [..., V], [..., V] -> [...]."""
    return torch.minimum(p, q).sum(dim=-1)


def distillation_loss(
    p: torch.Tensor, draft_logits: torch.Tensor, loss: Loss
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss over positions (scalar) and the acceptance probability of each position.

    p [N, V] target probabilities, draft_logits [N, V] -> scalar, [N].

    nla         -log(acceptance): the draft's own objective, best from a warm start.
    forward-kl  KL(p || q).
    lk-hybrid   w KL(p || q) + (1 - w) TV(p, q), w = exp(-3 x mean acceptance), treated as a constant:
                KL leads while p and q hardly overlap (there TV's gradient vanishes), TV takes over later.
    """
    log_q = torch.log_softmax(draft_logits, dim=-1)  # [N, V]
    accepted = acceptance_probability(p, log_q.exp())  # [N]
    if loss == "nla":
        return -accepted.clamp_min(1e-6).log().mean(), accepted.detach()
    divergence = (torch.special.xlogy(p, p) - p * log_q).sum(dim=-1).mean()
    if loss == "forward-kl":
        return divergence, accepted.detach()
    weight = torch.exp(-_LK_DECAY * accepted.detach().mean())
    return weight * divergence + (1 - weight) * (1 - accepted).mean(), accepted.detach()


def chain_loss(
    p: torch.Tensor, counted: torch.Tensor, chained: Iterable[torch.Tensor], loss: Loss
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The mean loss of what is drafted at each place of a chain (scalar), and the acceptance probability of
    each of these tokens.

    p [R, L, D]: the target's probabilities of the draft's tokens; what the target gives to others lowers
    acceptance, since they are never drafted. counted [R, L + 1]: the tokens at which a chain may begin and
    that are drafted, of which there must be one; the last is the one behind the sequences. chained: of each
    place of a chain logits [R, L - 1 or more, D], of chains that begin at every place of the sequences: place
    i drafts token i + 2 first.
    """
    losses, accepted = [], []
    for step, logits in enumerate(chained):
        ahead = p[:, 1 + step :]  # place i drafts token i + 2 + step, which the target predicts one before
        drafted = counted[:, 2 : 2 + ahead.shape[1]] & counted[:, 2 + step :]
        if drafted.any():
            each, acceptance = distillation_loss(ahead[drafted], logits[:, : ahead.shape[1]][drafted], loss)
            losses.append(each)
            accepted.append(acceptance)
    return torch.stack(losses).mean(), accepted
