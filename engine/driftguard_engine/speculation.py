"""Drawing and verifying in a step: by the kernels, or by the reference on the host.

Both read the same distributions and the same noise. A row of logits without a finite maximum has no
distribution: it draws -1, or its status says so, and other rows are what they are without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from driftguard_engine.kernels import verify as verify_kernels
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.reference import tree as tree_reference
from driftguard_engine.kernels.reference import verify as reference
from driftguard_engine.kernels.reference.distribution import TokenDistributions
from driftguard_engine.kernels.reference.sampling import (
    EVERY,
    Doubles,
    Index,
    Integers,
    SamplingBatch,
    Truths,
)
from driftguard_engine.kernels.reference.tree import ABSENT, Nodes, Noise, TreeRule
from driftguard_engine.kernels.reference.verify import Arrays, Rule, StepNoise, singles
from driftguard_engine.kernels.tensor_checks import without_distribution
from driftguard_engine.kernels.verify import SamplingTensors, Workspace

_TARGET, _DRAFT = 1, 2  # whose logits have no distribution
_TOO_LATE = "rows are guessed before anything is drawn"


@dataclass(frozen=True, slots=True)
class Verified:
    """The outcome of a verification of B rows, on the device that computed it."""

    tokens: Tensor  # [B, T] int64: the accepted drafts and one token of the target's own, padded with -1
    accepted: Tensor  # [B] int: draft tokens kept; -1 where the status is not 0
    status: Tensor  # [B] int: 0, or which logits have no distribution (1 the target's, 2 the draft's)


class Verification(Protocol):
    """One step of B rows with up to K drafts each, over V tokens. It is made with `drafted` [B]: how many
    drafts each row has, read at every call.

    The distribution of each token that is drawn is kept, so that no other one can be used to verify it. The
    distribution of a guess is a point mass. Where nothing was drawn or offered, all draft tokens are guesses.
    """

    draft_tokens: Tensor  # [B, K] int64; an id that the vocabulary lacks (-1: no proposal) is rejected

    @property
    def draft_logits(self) -> Tensor:
        """[B, K, V]: where a draft model writes its logits."""
        ...

    def guess(self, rows: Sequence[int], tokens: Tensor) -> None:
        """Guesses all drafts of these rows: those of tokens [B, K], on the CPU. Other rows may be drawn.

        Raises ValueError behind a draw: which rows are guessed must not depend on what was drawn.
        """
        ...

    def draw(self, step: int) -> None:
        """Draws draft token `step` of the rows that have more drafts and are not guessed, from
        draft_logits[:, step]."""
        ...

    def offer(self, logits: Tensor, tokens: Tensor) -> None:
        """Takes all draft tokens [B, K], which were drawn elsewhere from these raw logits [B, K, V]."""
        ...

    def verify(self, target_logits: Tensor) -> Verified:
        """By a rule of `verify.verify_chain`. target_logits: raw, [B, T, V], drafted < T <= K + 1."""
        ...


class KernelVerification:
    """See `Verification`. Nothing waits for the device: all but `offer` can be captured in a CUDA graph."""

    def __init__(
        self,
        launcher: Launcher,
        sampling: SamplingTensors,
        drafted: Tensor,
        drafts: int,
        vocabulary: int,
        dtype: torch.dtype,
        rule: Rule = "token",
    ) -> None:
        """drafted: int32. drafts: K. dtype: of both models' logits, one that the kernels read."""
        batch, device = len(sampling.seed), sampling.seed.device
        self._launcher, self._sampling, self._drafted = launcher, sampling, drafted
        self._drawn = 0  # steps
        self._guessed: Tensor | None = None  # rows
        self._space = Workspace.empty(batch, drafts, vocabulary, device, sampling.narrows, rule)
        self.draft_logits = torch.empty(batch, drafts, vocabulary, dtype=dtype, device=device)
        self.draft_tokens = self._space.draft_tokens

    def guess(self, rows: Sequence[int], tokens: Tensor) -> None:
        if self._drawn:
            raise ValueError(_TOO_LATE)
        self._guessed = torch.tensor(rows, device=self.draft_tokens.device)
        self.draft_tokens.zero_()
        self.draft_tokens[self._guessed] = tokens[rows].to(self.draft_tokens.device)

    def draw(self, step: int) -> None:
        logits = self.draft_logits[:, step]
        if self._guessed is not None:  # a draw from a point mass draws the guess, and keeps its distribution
            guesses = self.draft_tokens[self._guessed, step]
            logits[self._guessed] = point_masses(guesses, logits.shape[-1], logits.dtype)
        verify_kernels.draw_drafts(self._launcher, logits, self._sampling, self._space, step)
        self._drawn = step + 1

    def offer(self, logits: Tensor, tokens: Tensor) -> None:
        space, drafts = self._space, tokens.shape[1]
        if not drafts:
            return
        self.draft_logits = logits.contiguous()
        space.draft_tokens.copy_(tokens)
        verify_kernels.find_distributions(
            self._launcher,
            self.draft_logits,
            self._drafted,
            self._sampling,
            space.draft,
            drafts,
            0,
            space.meetings,
        )
        self._drawn = drafts

    def verify(self, target_logits: Tensor) -> Verified:
        if self._drawn and self._guessed is not None:
            for step in range(self._drawn, self._space.drafts):  # where only guesses are left
                self.draw(step)
        draft_logits = self.draft_logits if self._drawn else None
        space, unread = self._space, self._space.drafts + 1 - target_logits.shape[1]
        if unread:
            target_logits = F.pad(target_logits, (0, 0, 0, unread))
        verify_kernels.verify(
            self._launcher, target_logits, draft_logits, self._drafted, self._sampling, space
        )
        return Verified(space.tokens, space.accepted, space.status)


class ReferenceVerification:
    """See `Verification`. `verify` computes the target's distributions only: the drafts' are kept.

    What takes memory or time is made when it is first needed: a step of greedy rows, or without drafts, needs
    little of it.
    """

    def __init__(
        self,
        sampling: SamplingBatch,
        positions: Integers,
        drafted: Tensor,
        drafts: int,
        vocabulary: int,
        rule: Rule = "token",
    ) -> None:
        """positions [B]: index in each row's sequence of the first token that this step gives it.

        drafted: on the CPU. drafts: K.
        """
        self._rule: Rule = rule
        self.draft_tokens = torch.zeros(len(positions), drafts, dtype=torch.int64)
        self._sampling, self._positions, self._vocabulary = sampling, positions, vocabulary
        self._drafted, self._drawn = drafted.numpy(), False
        self._guessed: Truths = np.zeros(len(positions), np.bool_)

    @cached_property
    def draft_logits(self) -> Tensor:
        return torch.zeros(*self.draft_tokens.shape, self._vocabulary, dtype=torch.float32)

    @cached_property
    def _distributions(self) -> TokenDistributions:
        return TokenDistributions.certain(self._sampling, self.draft_tokens.shape[1], self._vocabulary)

    @cached_property
    def _noise(self) -> StepNoise:
        return self._noise_of(self.draft_tokens.shape[1])

    def _noise_of(self, drafts: int) -> StepNoise:
        return StepNoise(self._sampling.seed, self._positions, drafts + 1, self._rule)

    def guess(self, rows: Sequence[int], tokens: Tensor) -> None:
        if self._drawn:
            raise ValueError(_TOO_LATE)
        self._guessed[rows] = True
        self.draft_tokens[rows] = tokens[rows]

    def draw(self, step: int) -> None:
        drawing = (self._drafted > step) & ~self._guessed
        index: Index = EVERY if drawing.all() else drawing.nonzero()[0]
        logits = self.draft_logits.numpy()[index, step]
        usable = np.isfinite(logits.max(-1))
        if not usable.all():
            logits = np.where(usable[:, np.newaxis], logits, 0)
        if self._sampling.all_greedy:
            tokens: Integers = logits.argmax(-1)
        else:
            sampling = self._sampling.rows(index)
            distributions = reference.draft_distributions(logits[:, np.newaxis], sampling)
            noise = self._noise.draft(step, index)
            tokens = reference.draw_drafts(logits, distributions, sampling, noise)
            self._distributions.put(index, slice(step, step + 1), distributions)
        self.draft_tokens.numpy()[index, step] = np.where(usable, tokens, -1)
        self._drawn = True

    def offer(self, logits: Tensor, tokens: Tensor) -> None:
        offered = singles(logits)
        self.draft_logits, self.draft_tokens = torch.from_numpy(offered), tokens.cpu()
        self._distributions = reference.draft_distributions(offered, self._sampling)
        self._drawn = True

    def verify(self, target_logits: Tensor) -> Verified:
        target, lengths = singles(target_logits), self._drafted
        drafts = target.shape[1] - 1
        tokens = self.draft_tokens.numpy()[:, :drafts]
        proposed = np.arange(drafts) < lengths[:, np.newaxis]
        proposed &= tokens.view(np.uint64) < target.shape[-1]  # read as unsigned, an id below 0 is too large
        if not self._drawn:
            self._guess_all(tokens)
        elif self._guessed.any() and not self._sampling.all_greedy:  # their distributions are still certain
            guesses = self.draft_tokens[self._guessed, :drafts]
            masses = point_masses(guesses, self._vocabulary, torch.float32)
            self.draft_logits[self._guessed, :drafts] = masses
        draft, distributions = self.draft_logits.numpy(), self._distributions.rows(EVERY, slice(drafts))
        given = Arrays(target, draft[:, :drafts], distributions, tokens, lengths, proposed, self._sampling)
        accepted, own, valid = reference.verify(given, self._noise, rule=self._rule)
        emitted, status = reference.emitted(tokens, accepted, own), np.zeros_like(accepted)
        if not valid:
            status = _status(given)
            emitted[status != 0], accepted[status != 0] = -1, -1
        return Verified(*(torch.from_numpy(each) for each in (emitted, accepted, status)))

    def _guess_all(self, tokens: Integers) -> None:
        """Point masses at these tokens [B, T - 1]. Greedy rows read none."""
        drafts = tokens.shape[1]
        if self._sampling.all_greedy or not drafts:
            self.draft_logits = torch.empty(*tokens.shape, self._vocabulary, dtype=torch.float32)
        else:
            self.draft_logits = point_masses(torch.from_numpy(tokens), self._vocabulary, torch.float32)
        self._distributions = TokenDistributions.certain(self._sampling, drafts, self._vocabulary)
        self._noise = self._noise_of(drafts)


@dataclass(frozen=True, slots=True)
class TreeInputs:
    """What the target reads of B trees: of each row the newest token, then the nodes that it has."""

    token_ids: Tensor  # [B, T] int64, 0 behind a row's own
    parents: list[tuple[int, ...]]  # of each row's own tokens: their parents' places; -1 of the newest token


@dataclass(frozen=True, slots=True)
class VerifiedTree(Verified):
    """tokens [B, D + 1]: D the most that a row may accept; accepted: how long the path is."""

    path: Integers  # [B, D]: columns of the accepted nodes, padded with -1
    places: Integers  # [B, D + 1]: where the newest token and they stand in the inputs, padded with 0


class TreeVerification:
    """One step of B rows with trees of draft tokens, on the host. See `kernels.reference.tree` for the rules.

    Each call appends the same columns to every row, and returns them; a node's parent is a column before it,
    or -1, the newest token. A row lacks a node (its token is -1) that it was not given, whose parent it
    lacks, that is deeper than its draft tokens, or that finds no room.
    """

    def __init__(
        self,
        sampling: SamplingBatch,
        positions: Integers,
        drafted: Tensor,
        room: Integers,
        vocabulary: int,
        rule: TreeRule = "rejection",
    ) -> None:
        """positions [B]: index in each row's sequence of the first token that this step gives it.

        drafted [B]: the most tokens that it may accept. room [B]: nodes that its slot can hold. rule: for
        what is drawn.
        """
        batch, asked = len(positions), drafted.cpu().numpy().astype(np.int64)
        self.probes: list[int] = []  # columns that are read and never accepted
        self.depth = int(asked.max(initial=0))  # what lies deeper is of no use in any row
        self._sampling, self._noise, self._rule = sampling, Noise(sampling.seed, positions), rule
        self._drafted, self._asked, self._vocabulary = drafted, asked[:, np.newaxis], vocabulary
        self._left = np.where(asked > 0, room, 0)[:, np.newaxis]
        # Columns from 1 on: the root is the first.
        self._tokens, self._parents, self._depths = np.zeros((3, batch, 1), np.int64)
        self._draws: list[int] = []
        self._laws: list[Doubles] = []
        self._drawn_from: set[int] = set()

    @property
    def tokens(self) -> Tensor:
        """[B, N]: of all columns, -1 where a row lacks the node."""
        return torch.from_numpy(self._tokens[:, 1:])

    def guess(self, tokens: Tensor, parents: Tensor | Sequence[int]) -> range:
        """Tokens [B, n], -1 for none, which depend on no random number of this step; parents [B, n] or [n].

        Guesses are accepted where the target draws them itself: of unlike siblings, any are of use.
        """
        return self._append(tokens, parents, [-1] * tokens.shape[1])

    def probe(self, tokens: Tensor, parents: Tensor | Sequence[int]) -> range:
        """As `guess`, but never accepted: the drafter is told what the target reads there. Only probes may
        have a probe as their parent, and they may be of any depth."""
        columns = self._append(tokens, parents, [-1] * tokens.shape[1], probing=True)
        self.probes.extend(columns)
        return columns

    def draw(self, logits: Tensor, parents: Sequence[int], counts: Sequence[int]) -> range:
        """Children of these nodes, all of one depth: of each the first counts[i] tokens of one draw without
        replacement from logits [B, V], -inf for tokens that cannot be drawn. Of greedy rows the likeliest.

        Logits and counts may depend on what was drawn above these nodes, but on no random number that draws
        or verifies their children. Raises ValueError where a node has drawn children already.
        """
        if again := self._drawn_from.intersection(parents):
            raise ValueError(f"children of node {min(again)} were drawn before, by another law")
        depths = set(self._depths[:, [parent + 1 for parent in parents]].flat)
        if len(depths) != 1:
            raise ValueError(f"the parents of one draw have one depth, got {sorted(map(int, depths))}")
        self._drawn_from.update(parents)
        depth = int(depths.pop())
        tokens, law = tree_reference.draw_siblings(
            singles(logits), max(counts), depth, self._sampling, self._noise
        )
        self._laws.append(law)
        siblings = [sibling for count in counts for sibling in range(count)]
        of_each = [parent for parent, count in zip(parents, counts, strict=True) for _ in range(count)]
        draws = [len(self._laws) - 1] * len(siblings)
        return self._append(torch.from_numpy(tokens[:, siblings]), of_each, draws)

    def _append(
        self, tokens: Tensor, parents: Tensor | Sequence[int], draws: list[int], *, probing: bool = False
    ) -> range:
        first, new = self._tokens.shape[1], tokens.cpu().numpy().astype(np.int64)
        count = new.shape[1]
        above = np.broadcast_to(np.asarray(parents, np.int64) + 1, new.shape)
        if (above >= first + np.arange(count)).any() or (above < 0).any():
            raise ValueError("the parent of a node is -1 or stands before it")
        if not probing and np.isin(above - 1, self.probes).any():
            raise ValueError("the parent of a node that can be accepted is no probe")
        if count > 1 and (above >= first).any():
            for node in range(count):
                at = slice(node, node + 1)
                self._append(tokens[:, at], torch.from_numpy(above[:, at] - 1), draws[at], probing=probing)
            return range(first - 1, first - 1 + count)
        depths = np.take_along_axis(self._depths, above, 1) + 1
        has = (np.take_along_axis(self._tokens, above, 1) >= 0) & (new.view(np.uint64) < self._vocabulary)
        if not probing:
            has &= depths <= self._asked
        has &= has.cumsum(1) <= self._left
        self._left = self._left - has.sum(1, keepdims=True)
        self._tokens = np.concatenate((self._tokens, np.where(has, new, ABSENT)), 1)
        self._parents = np.concatenate((self._parents, above), 1)
        self._depths = np.concatenate((self._depths, depths), 1)
        self._draws += draws
        return range(first - 1, first - 1 + count)

    def inputs(self, newest: Tensor) -> TreeInputs:
        """All that the target reads. newest [B]: tokens. Lowers `drafted` to the depth that each row has."""
        there = self._tokens >= 0
        self._places = np.where(there, there.cumsum(1) - 1, 0)  # [B, 1 + N]
        candidates = there.copy()
        candidates[:, [column + 1 for column in self.probes]] = False
        self._drafted.copy_(torch.from_numpy((self._depths * candidates).max(1)))
        token_ids = np.zeros((len(there), 1 + int(self._places.max())), np.int64)
        rows, columns = there.nonzero()
        token_ids[rows, self._places[rows, columns]] = self._tokens[rows, columns]
        token_ids[:, 0] = newest.cpu().numpy()
        parents = []
        for row, has in enumerate(there):
            parents.append((-1, *self._places[row, self._parents[row, has][1:]].tolist()))
        return TreeInputs(torch.from_numpy(token_ids), parents)

    def verify(self, target_logits: Tensor) -> VerifiedTree:
        """target_logits: raw, [B, T, V], of what `inputs` gave, on any device. The result is on the host."""
        tokens = self._tokens[:, 1:].copy()
        tokens[:, self.probes] = ABSENT
        nodes = Nodes(tokens, self._parents[:, 1:] - 1, np.array(self._draws, np.int64), self._laws)
        emitted, path, valid = tree_reference.verify_tree(
            singles(target_logits),
            nodes,
            self._places[:, 1:],
            self.depth,
            self._sampling,
            self._noise,
            self._rule,
        )
        emitted[~valid], path[~valid] = -1, -1
        accepted = np.where(valid, (path >= 0).sum(1), -1)
        places = np.take_along_axis(self._places, path + 1, 1)  # 0 where nothing was accepted
        of_path = np.column_stack((np.zeros_like(accepted), places))
        status = np.where(valid, 0, _TARGET)
        of_tokens = torch.from_numpy(emitted), torch.from_numpy(accepted), torch.from_numpy(status)
        return VerifiedTree(*of_tokens, path, of_path)

    def places(self, columns: Sequence[int]) -> Integers:
        """Where these nodes stand in the inputs, 0 where a row lacks one: [B, len(columns)]."""
        return self._places[:, [column + 1 for column in columns]]


def point_masses(tokens: Tensor, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Logits [..., V] that are 0 at tokens [...] and -inf elsewhere; for an id that the vocabulary lacks, of
    which none is read, at another token."""
    places = tokens.clamp(0, vocabulary - 1).unsqueeze(-1)
    logits = torch.full((*tokens.shape, vocabulary), -torch.inf, dtype=dtype, device=tokens.device)
    return logits.scatter_(-1, places, 0)


def _status(given: Arrays) -> Integers:
    read = np.arange(given.target.shape[1]) <= given.lengths[:, np.newaxis]
    stochastic = ~given.sampling.greedy[:, np.newaxis]
    of_target = without_distribution(given.target, read).any(-1)
    of_draft = without_distribution(given.draft, given.proposed & stochastic).any(-1)
    return np.where(of_target, _TARGET, np.where(of_draft, _DRAFT, 0))
