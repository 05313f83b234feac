"""Lookahead decoding (Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
2024, arXiv:2402.02057): no draft model. Beside its guesses a step reads a window of tokens further on, which
the target refines from step to step (Jacobi iteration); the n-grams that appear on the way are guessed later,
where their first token is the newest one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch

from driftguard_engine.drafters.base import Drafter, TreeOutcome
from driftguard_engine.kernels.reference.sampling import Integers
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.speculation import TreeVerification


@dataclass(slots=True)
class _Trajectory:
    """Of one request. Level i of column j is a guess of the token i + j places behind the newest one, which
    stands in for level 0 of column 0; the last level is the newest."""

    window: Integers  # [N - 1, W]
    # By first token: the N - 1 tokens behind it, those seen last at the end.
    pool: defaultdict[int, dict[tuple[int, ...], None]] = field(default_factory=lambda: defaultdict(dict))

    def refine(self, newest: int, likeliest: Integers, candidates: int) -> None:
        """likeliest [W]: what the target says behind each column. Keeps `candidates` n-grams a token."""
        self.window[0, 0] = newest
        for first, *others in np.vstack((self.window, likeliest)).T.tolist():
            known = self.pool[first]
            known.pop(tuple(others), None)
            known[tuple(others)] = None
            if len(known) > candidates:
                del known[next(iter(known))]
        self.window = np.vstack((self.window[1:], likeliest))


class LookaheadDrafter(Drafter):
    """See `Drafter`. Guesses and window depend on emitted tokens and on the target's likeliest tokens behind
    them and behind earlier windows: on random numbers only as far as these drew tokens that were emitted.

    As in the authors' code (github.com/hao-ai-lab/LookaheadDecoding) the window moves on by one place in each
    step, however many tokens it emits. Unlike there it begins with n-grams of the prompt, not with random
    tokens of it: the same request is always guessed alike.
    """

    trees = True
    obstacle = "it drafts trees, which are verified on the host, for which each step waits"

    def __init__(self, window: int, ngram: int, candidates: int) -> None:
        """W, N >= 3 and G of the paper: columns, tokens of an n-gram, and most guesses of a step."""
        self._window, self._ngram, self._candidates = window, ngram, candidates
        self._by_slot: dict[int, _Trajectory] = {}

    def draft_tree(self, rows: RowState, tree: TreeVerification) -> None:
        trajectories = [self._trajectory(rows, row) for row in range(len(rows.slots))]
        newest = rows.fed[:, 0].tolist()
        pairs = zip(trajectories, newest, strict=True)
        self._guess(tree, [list(each.pool.get(token, ())) for each, token in pairs])
        window = torch.from_numpy(np.stack([each.window for each in trajectories]))
        columns = [-1]
        for column in range(1, self._window):  # each sees those before it
            columns += tree.probe(window[:, 0, [column]], columns[-1:])
        for level in range(1, self._ngram - 1):  # each sees its own column, and what that sees
            columns = [*tree.probe(window[:, level], columns)]

    def _trajectory(self, rows: RowState, row: int) -> _Trajectory:
        slot = int(rows.slots[row])
        if slot not in self._by_slot:
            length = int(rows.lengths[row])
            text = rows.state.token_ids[slot, :length].cpu().numpy()
            begins = np.arange(self._window) * length // self._window
            places = begins + np.arange(self._ngram - 1)[:, np.newaxis]
            self._by_slot[slot] = _Trajectory(text[places % length])
        return self._by_slot[slot]

    def _guess(self, tree: TreeVerification, ngrams: list[list[tuple[int, ...]]]) -> None:
        """What may follow in each row, as a tree in which common beginnings are one path."""
        columns: list[dict[tuple[int, ...], int]] = [{(): -1} for _ in ngrams]
        for depth in range(1, 1 + min(tree.depth, self._ngram - 1)):
            nodes = [[*dict.fromkeys(ngram[:depth] for ngram in row)] for row in ngrams]
            width = max(map(len, nodes))
            tokens, parents = np.full((2, len(ngrams), width), -1)
            for row, paths in enumerate(nodes):
                tokens[row, : len(paths)] = [path[-1] for path in paths]
                parents[row, : len(paths)] = [columns[row][path[:-1]] for path in paths]
            guessed = tree.guess(torch.from_numpy(tokens), torch.from_numpy(parents))
            for known, paths in zip(columns, nodes, strict=True):
                known |= dict(zip(paths, guessed, strict=False))

    def observe_tree(self, rows: RowState, tree: TreeVerification, outcome: TreeOutcome, /) -> None:
        if not tree.probes:
            return
        last = slice(-self._window, None)  # the last level
        read = (tree.tokens[:, tree.probes[last]] >= 0).all(1).tolist()
        likeliest = outcome.probe_logits[:, last].argmax(-1).cpu().numpy()
        newest = rows.fed[:, 0].tolist()
        for row, slot in enumerate(rows.slots.tolist()):
            if read[row]:
                self._by_slot[slot].refine(newest[row], likeliest[row], self._candidates)

    def forget(self, slot: int) -> None:
        self._by_slot.pop(slot, None)
