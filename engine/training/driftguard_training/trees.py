"""What an engine that serves a draft of trees would have guessed and accepted on a logged answer.

The tree is of fixed shape, and its tokens are the likeliest of each depth: no token is drawn. With the
target's p_t, a node with children of ranks C accepts with probability a_t = sum of p_t over the tokens of
these ranks, by either rule of driftguard_training.serving, and it did accept x_t if that is one of them. So
the steps that made an answer are known, and with them what was accepted of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

Node: TypeAlias = tuple[int, ...]
_ROOT: Node = ()


class TreeOfAnswer:
    """The likeliest tokens of each depth, at every position of the answer at which they can be drafted."""

    def __init__(self, tree: Collection[Node]) -> None:
        """tree: nodes, each as the ranks of the tokens on its way."""
        self._children: dict[Node, list[int]] = defaultdict(list)
        for *parent, rank in sorted(tree):
            self._children[tuple(parent)].append(rank)
        self._ranks = 1 + max(path[-1] for path in tree)
        self._firsts: list[int] = []  # by depth: the first position of the answer that can be drafted
        self._found: list[list[int]] = []  # by depth and position: the rank of the answer's token; -1: none
        self._mass: list[Tensor] = []  # by depth [n, ranks]: the target's probability of each rank

    def add(self, p: Tensor, logits: Tensor, answer: Sequence[int]) -> None:
        """Of the next depth. p [outputs, V]: the target's. logits [n, V]: of the answer's last n tokens."""
        first = len(p) - len(logits)
        likeliest = logits.topk(min(self._ranks, logits.shape[-1])).indices
        same = likeliest == torch.tensor(answer[first:], dtype=torch.long)[:, None]
        self._firsts.append(first)
        self._found.append(torch.where(same.any(-1), same.int().argmax(-1), -1).tolist())
        self._mass.append(p[first:].gather(-1, likeliest))

    def kept(self) -> float:
        """Mean a_t over all depths, of the node on the likeliest way; 0 where nothing can be drafted."""
        known = [mass[:, self._children[(0,) * depth]].sum(-1) for depth, mass in enumerate(self._mass)]
        together = torch.cat(known)
        return float(together.mean()) if len(together) else 0.0

    def walk(
        self, lengths: Sequence[float], length: int, *, is_cut: bool, first_only: bool
    ) -> tuple[float, float, float, float]:
        """As `serving.walk`: steps, drafted, accepted before the tokens were drawn, and given the answer.

        Drafted is how deep the trees are. length: tokens of the answer.
        """
        lengths = lengths[: len(self._found)]
        more = [now / before for before, now in pairwise([1.0, *lengths])]
        starts = [1.0] + [0.0] * (length + len(lengths) + 1)  # P(a step starts at t)
        drafted = expected = of_answer = 0.0
        for start in range(length):
            reached, node = starts[start], _ROOT
            count = min(len(lengths), length - start - 1) if is_cut else len(lengths)
            count = 0 if start < self._firsts[0] else count
            drafted += reached * sum(lengths[: min(count, 1) if first_only else count])
            for depth in range(min(count, length - start)):
                place, offered = start + depth - self._firsts[depth], reached * more[depth]
                children, rank = self._children[node], self._found[depth][place]
                kept = offered if rank in children else 0.0
                if depth == 0 or not first_only:
                    expected += offered * float(self._mass[depth][place, children].sum())
                    of_answer += kept
                starts[start + depth + 1] += reached - kept
                reached, node = kept, (*node, rank)
            starts[start + count + 1] += reached
        return sum(starts[:length]), drafted, expected, of_answer
