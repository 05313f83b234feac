"""Verification of trees of draft tokens in numpy. At each node, from the root on, by one of two exact rules:

sampling: the target's own token is drawn, and where it is a child, that child is accepted (the naive sampling
of Miao et al., "SpecInfer", ASPLOS 2024, arXiv:2305.09781): for any children, also those of unknown law.
rejection: children that were drawn from a known q without replacement are tried in the order of drawing: x is
accepted with probability min(1, p(x) / q(x)); else p becomes (p - q)+ normalised, and q is normalised without
x. Where none is left, the target's own token is drawn from p (Yang et al., "Multi-Candidate Speculative
Decoding", 2024, arXiv:2401.06706; Jeon et al., "Recursive Speculative Decoding", 2024, arXiv:2402.14160).
A child that was guessed is accepted by sampling, behind those that were drawn. What is accepted leads down:
nodes beside the path are not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from driftguard_engine.kernels.reference import philox
from driftguard_engine.kernels.reference.distribution import TokenDistributions, token_distributions
from driftguard_engine.kernels.reference.exp2 import Singles, numpy_exp2
from driftguard_engine.kernels.reference.sampling import Doubles, Integers, SamplingBatch, Truths
from driftguard_engine.kernels.reference.verify import draw_token

TreeRule = Literal["rejection", "sampling"]

ABSENT = -1


@dataclass(frozen=True, slots=True)
class Noise:
    """Random words of B rows by (position, purpose, place among siblings). Nodes of one depth share them: one
    of these at most is on the path."""

    seed: Integers  # [B]
    position: Integers  # [B]: index in the sequence of the first token that the step emits

    def words(self, rows: Integers, depth: int, purpose: int, sibling: int = 0) -> philox.RandomWords:
        """[2, N] of these rows [N], of a token `depth` behind the first."""
        return philox.words(self.seed[rows], self.position[rows] + depth, purpose | sibling << 32)


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of B rows, N columns; each parent stands before its children."""

    tokens: Integers  # [B, N]; ABSENT: the row has no such node
    parents: Integers  # [B, N]: columns; -1 is the root, which is the newest token
    draws: Integers  # [N]: which draw; -1: guessed
    laws: Sequence[Doubles]  # by draw, [B, V]: the q of which its first token was drawn; greedy rows: unread


def draw_siblings(
    logits: Singles, count: int, depth: int, sampling: SamplingBatch, noise: Noise
) -> tuple[Integers, Doubles]:
    """`count` tokens of each row of logits [B, V], without replacement, and their q: [B, count], [B, V].

    depth: of the tokens, from 0 on. Of greedy rows the likeliest ones. ABSENT where no token is left, or the
    row has no distribution.
    """
    batch, size = logits.shape
    tokens, law = np.full((batch, count), ABSENT, np.int64), np.zeros((batch, size))
    usable = np.isfinite(logits.max(-1))
    greedy, drawn = ((usable & kind).nonzero()[0] for kind in (sampling.greedy, ~sampling.greedy))
    if len(greedy):
        left = logits[greedy].copy()
        for sibling in range(count):
            best = left.argmax(-1)
            at = np.arange(len(greedy)), best
            tokens[greedy, sibling] = np.where(left[at] > -np.inf, best, ABSENT)
            left[at] = -np.inf
    if len(drawn):
        distributions, mass = _masses(logits[drawn], sampling.rows(drawn))
        law[drawn] = mass / mass.sum(-1, keepdims=True, dtype=np.float64)
        changed = distributions.cut[:, 0] > -np.inf
        for sibling in range(count):
            words = noise.words(drawn, depth, philox.DRAFT, sibling)
            found = draw_token(mass, distributions.tile_mass[:, 0], changed, words)
            at = np.arange(len(drawn)), found
            tokens[drawn, sibling] = np.where(mass[at] > 0, found, ABSENT)
            mass[at] = 0
            changed = np.ones(len(drawn), np.bool_)
    return tokens, law


def _masses(logits: Singles, sampling: SamplingBatch) -> tuple[TokenDistributions, Singles]:
    """Of logits [N, V]: their distributions, S = 1, and weights [N, V]."""
    distributions = token_distributions(logits[:, np.newaxis], sampling)
    return distributions, distributions.weigh(logits[:, np.newaxis], np.arange(logits.shape[-1]), numpy_exp2)[
        :, 0
    ]


@np.errstate(invalid="ignore")  # rows of logits without a distribution
def verify_tree(
    target: Singles,
    nodes: Nodes,
    places: Integers,
    depth: int,
    sampling: SamplingBatch,
    noise: Noise,
    rule: TreeRule = "rejection",
) -> tuple[Integers, Integers, Truths]:
    """Emitted tokens [B, depth + 1], padded with -1; the accepted nodes' columns [B, depth], padded with -1;
    and whether the target's logits that were read have a distribution, [B].

    target [B, T, V]: raw logits; those of column n of row b at places[b, n], of the root at 0.
    """
    batch = len(target)
    emitted, path = np.full((batch, depth + 1), -1, np.int64), np.full((batch, depth), -1, np.int64)
    valid, rows = np.ones(batch, np.bool_), np.arange(batch)
    at, at_place = np.full(batch, -1, np.int64), np.zeros(batch, np.int64)
    for step in range(depth + 1):
        if not len(rows):
            break
        logits = target[rows, at_place[rows]]
        finite = np.isfinite(logits.max(-1))
        valid[rows[~finite]] = False
        rows, logits = rows[finite], logits[finite]
        children = (nodes.parents[rows] == at[rows, np.newaxis]) & (nodes.tokens[rows] >= 0)
        own, taken = _descend(logits, nodes, children, rows, step, sampling, noise, rule)
        emitted[rows, step] = own
        rows, taken = rows[taken >= 0], taken[taken >= 0]
        if step < depth:
            path[rows, step] = at[rows] = taken
            at_place[rows] = places[rows, taken]
    return emitted, path, valid


def _descend(
    logits: Singles,
    nodes: Nodes,
    children: Truths,
    rows: Integers,
    step: int,
    sampling: SamplingBatch,
    noise: Noise,
    rule: TreeRule,
) -> tuple[Integers, Integers]:
    """The next token of these rows [A], and the column of the child that it is, else -1. children [A, N]."""
    own, taken = np.full((2, len(rows)), -1, np.int64)
    greedy = sampling.greedy[rows]
    own[greedy] = logits[greedy].argmax(-1)
    sampled = (~greedy).nonzero()[0]
    if len(sampled):
        p = _masses(logits[sampled], sampling.rows(rows[sampled]))[1].astype(np.float64)
        p /= p.sum(-1, keepdims=True)
        if rule == "rejection":
            drawn = children[sampled] & (nodes.draws >= 0)
            taken[sampled] = _reject(p, nodes, drawn, rows[sampled], step, noise)
        words = noise.words(rows[sampled], step, philox.RESIDUAL)
        own[sampled] = draw_token(p.astype(np.float32), p[:, :1], np.ones(len(sampled), np.bool_), words)
        accepted = sampled[taken[sampled] >= 0]
        own[accepted] = nodes.tokens[rows[accepted], taken[accepted]]
    matches = children & (nodes.tokens[rows] == own[:, np.newaxis])
    if matches.any():
        taken = np.where((taken < 0) & matches.any(-1), matches.argmax(-1), taken)
    return own, taken


def _reject(p: Doubles, nodes: Nodes, drawn: Truths, rows: Integers, step: int, noise: Noise) -> Integers:
    """The column of the accepted child of each row, else -1: [A]. p [A, V] becomes what is left of it."""
    taken = np.full(len(rows), -1, np.int64)
    if not drawn.any():
        return taken
    order = np.argsort(~drawn, axis=-1, kind="stable")  # the columns of the children first, as drawn
    counts = drawn.sum(-1)
    law, draws = np.zeros_like(p), np.where(counts > 0, nodes.draws[order[:, 0]], -1)
    for draw in {*draws.tolist()} - {-1}:
        law[draws == draw] = nodes.laws[draw][rows[draws == draw]]
    for sibling in range(counts.max()):
        trying = ((taken < 0) & (sibling < counts)).nonzero()[0]
        column = order[trying, sibling]
        token = nodes.tokens[rows[trying], column]
        uniform = philox.uniforms_of(noise.words(rows[trying], step, philox.ACCEPT, sibling)[0])
        passed = uniform * law[trying, token] < p[trying, token]
        taken[trying[passed]] = column[passed]
        failed, token = trying[~passed], token[~passed]
        p[failed] = _normalised(np.maximum(p[failed] - law[failed], 0), p[failed])
        law[failed, token] = 0
        law[failed] = _normalised(law[failed], law[failed])
    return taken


def _normalised(mass: Doubles, otherwise: Doubles) -> Doubles:
    """[N, V]. An empty residual takes p = q up to rounding, and then p is the distribution to draw from."""
    total = mass.sum(-1, keepdims=True)
    return np.where(total > 0, mass / np.where(total > 0, total, 1), otherwise)
