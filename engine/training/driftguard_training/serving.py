"""What an engine that serves target and draft faithfully would have drafted and accepted on logged answers.

An answer x_1 ... x_n that the target sampled at temperature T is walked as the engine made it. With the
target's p_t and the draft's q_t, both at T and after the same tokens, a drafted token is accepted with
probability a_t = sum_v min(p_t, q_t), and was accepted, given that x_t came of it, with
b_t = min(1, q_t(x_t) / p_t(x_t)). A step that starts at s drafts up to K tokens; it reaches the i-th with
probability b_s ... b_{s+i-1}. Summed over all steps, the a_{s+i} of what is reached are the expected number
of accepted tokens: unbiased over answers, and with less variance than a replay, as neither the tokens of the
draft nor the coins of the rule are drawn. The b_{s+i} are that number given the very answer: as unbiased, and
nearer to what the engine counted, which made the same answer. The first tells how well the draft fits the
text, the second is what served acceptance is compared with. Of an EAGLE-3 head q_t, and with it a_t and b_t,
depend also on how many drafts lie between the start of the step and t.

Of a draft that guesses a tree, see driftguard_training.trees.

Two rules. "rejection": the draft's tokens are drawn from q_t at T, by the rule of Leviathan, Kalman, Matias
(2023). "match": the draft proposes the argmax of q_t at any T, and it is kept with probability p_t of it, as
where the target draws a token and keeps the draft if it is the same: q_t is then all mass on one token. That
is what vLLM, SGLang, TensorRT-LLM and llama.cpp do unless told otherwise. At T = 0 both are the same.

That is verification token by token. Sampled drafts that are verified as a block (Sun et al. 2025) keep more.
Of a step at s let r_s = 1 and r_{t+1} = min(1, r_t p_t(x_t) / q_t(x_t)): averaged over what is drafted behind
it, a drafted run is kept with probability r of its end. So with the answer given, the step keeps its tokens
up to x_t with probability r_{t+1} prod_{s <= i <= t} q_i(x_i) / p_i(x_i), whatever K is. That is the walk
above with a_t = sum_v min(p_t, q_t / r_t) and b_t = min(1, q_t(x_t) / (p_t(x_t) r_t)), which depend on where
the step started. By "match" and at T = 0 it is the same as token by token.

Where K changed from step to step, counts per position tell how many of the steps drafted at least i tokens.
These lengths are taken as drawn anew for each step, and only the first draft token of a step is counted:
whether that is accepted depends on K through where steps begin alone.

An answer that was cut at its longest length is taken to end as in the built-in engine and llama.cpp, which
draft no more there than still fits; vLLM drafts K tokens to the end, and accepts some behind it. So the
acceptance of vLLM is taken to be higher than it is: at K = 4 by .04 in answers of 8 tokens, by .02 of 16, and
by less than .01 from 24 on. So is that of an answer that a stop string ended: captured tokens do not tell it
from one that was cut. The first token is taken to be drafted, as in the built-in engine; vLLM and
llama.cpp make it from the prompt alone, which moves acceptance by less than .01.

Assumptions: no top-k and top-p; and answers that are the target's own. The last is tested by the surprise of
each token, sum_v p_t(v) z_t(v) - z_t(x_t) with the target's logits z_t: 0 in expectation if x_t is drawn from
p_t, at any T, whatever came before it. At T = 1 it is -log p_t(x_t) less the entropy of p_t; at T = 0 by how
much x_t is not the argmax.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import NamedTuple, get_args

import torch
from driftguard_engine.models.loading import eos_token_ids
from torch import Tensor

from driftguard_training.acceptance import acceptance_probability, distribution
from driftguard_training.drafts.base import Draft
from driftguard_training.drafts.kinds import load_draft
from driftguard_training.model_directories import LoadedModel, load_model
from driftguard_training.settings import AcceptanceRule, ScoreSettings
from driftguard_training.teacher import Told, read_answers
from driftguard_training.traffic import ServedRequest, is_served_by, read_served
from driftguard_training.trees import TreeOfAnswer

_BATCH_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Expected:
    """Counts of a faithful engine, of the first draft tokens alone where K varied. `accepted`: before the
    tokens were drawn; `accepted_of_answer`: given that this answer came of them."""

    steps: float
    drafted: float
    accepted: float
    accepted_of_answer: float


@dataclass(frozen=True, slots=True)
class Score:
    """Of one request: expected counts under each rule, and the sum of the surprise of its `tokens` in
    nats."""

    rejection: Expected
    match: Expected
    surprise: float
    tokens: int


def score(settings: ScoreSettings) -> Iterator[dict[str, object]]:
    """One event per request, in the order of the file: its number in the file, from 0, and its score. A
    request that does not fit the models' context is left out.

    Raises:
        TrainingRefused: bad models or bad traffic.
    """
    target = load_model(settings.target, "target")
    draft = load_draft(settings.draft, target)
    context = min(target.context_tokens, draft.context_tokens)
    numbered = list(enumerate(read_served(settings.traffic)))
    fitting = [(number, one) for number, one in numbered if is_served_by(one, target.vocabulary, context)]
    for start in range(0, len(fitting), _BATCH_REQUESTS):
        batch = fitting[start : start + _BATCH_REQUESTS]
        scored = score_batch(target, draft, [one for _, one in batch])
        for (number, _), found in zip(batch, scored, strict=True):
            yield {"number": number, **asdict(found)}


@torch.no_grad()
def score_batch(target: LoadedModel, draft: Draft, requests: Sequence[ServedRequest]) -> list[Score]:
    """Of each request."""
    told = read_answers(target.model, requests, draft.features)
    answers = [DraftedAnswer(one, z.double()) for one, z in zip(requests, told.logits, strict=True)]
    add_drafts(answers, draft, requests, told)
    ends = ends_of(target)
    return [answer.score(ends) for answer in answers]


def add_drafts(
    answers: Sequence[DraftedAnswer], draft: Draft, requests: Sequence[ServedRequest], told: Told
) -> None:
    """What this draft would have drafted of each of these answers."""
    most = max(len(request.lengths) for request in requests)
    for place in draft.places(requests, told, most):
        for answer, logits in zip(answers, place, strict=True):
            answer.add(logits, draft.tree)
    for answer in answers:
        answer.end()


def ends_of(target: LoadedModel) -> frozenset[int]:
    """The tokens that end an answer, as the engine finds them."""
    return eos_token_ids(target.model.generation_config, target.model.config, target.tokenizer)


class DraftedAnswer:
    """One answer, and the a_t and b_t of its tokens at each place of a chain of drafts."""

    def __init__(
        self, request: ServedRequest, z: Tensor, rules: Collection[AcceptanceRule] = get_args(AcceptanceRule)
    ) -> None:
        """z [outputs, V]: the target's logits."""
        self._request, self._z = request, z
        self._p = distribution(z, request.temperature)
        self._run = torch.ones(len(z), dtype=self._p.dtype)  # r of the tokens before in a block, if it is one
        self._rules: dict[AcceptanceRule, list[_Place]] = {rule: [] for rule in rules}
        self._tree: TreeOfAnswer | None = None

    def add(self, logits: Tensor, tree: Collection[tuple[int, ...]] | None = None) -> None:
        """logits [n, V]: from which its last n tokens are drafted at the next place of a chain, or of this
        tree."""
        self._logits = logits
        first = len(self._p) - len(logits)
        p, logits = self._p[first:], logits.to(self._p)
        if tree is not None:
            self._tree = self._tree or TreeOfAnswer(tree)
            self._tree.add(self._p, logits, self._request.output_token_ids)
            return
        answer = torch.tensor(self._request.output_token_ids)[first:, None]  # [n, 1]
        for rule, places in self._rules.items():
            q = distribution(logits, 0.0 if rule == "match" else self._request.temperature)
            p_x, q_x = (each.gather(-1, answer).squeeze(-1) for each in (p, q))
            # Where p_t(x_t) is 0 the answer is not the target's own; x_t is then kept only if it was drafted.
            ratio = torch.where(p_x > 0, q_x / p_x, (q_x > 0).to(p))
            single = accepted = acceptance_probability(p, q)
            if rule == "rejection" and self._is_block:
                run = self._run[first:]
                accepted = acceptance_probability(p, q / run[:, None])
                ratio = ratio / run
                self._run[first + 1 :] = (1 / ratio).clamp(1e-300, 1.0)[:-1]
            kept, unknown = ratio.clamp(max=1.0), [0.0] * first
            places.append(
                _Place(first, unknown + accepted.tolist(), unknown + kept.tolist(), single.tolist())
            )

    def end(self) -> None:
        """The chain goes on as at its last place. In a block these are no more alike."""
        done = max(len(places) for places in self._rules.values())
        for _ in range(done, len(self._request.lengths) if self._is_block else 0):
            self.add(self._logits)

    @property
    def _is_block(self) -> bool:
        return self._request.verification == "block" and self._tree is None

    def kept(self, rule: AcceptanceRule) -> float:
        """Mean acceptance probability of a single token over all places of a chain; 0 where nothing can be
        drafted of the answer."""
        if self._tree is not None:
            return self._tree.kept()
        known = [a for place in self._rules[rule] for a in place.single]
        return sum(known) / len(known) if known else 0.0

    def singles(self, rule: AcceptanceRule) -> list[float]:
        """Acceptance probability of a token that is drafted alone, of each of the answer; 0 where none can
        be."""
        place = self._rules[rule][0]
        return [0.0] * place.first + place.single

    def counts(
        self, rule: AcceptanceRule, ends: Collection[int], guesses: Sequence[Guess | None] = ()
    ) -> Expected:
        """`ends`: tokens that end an answer. `guesses`: see `walk`."""
        is_cut = self._request.output_token_ids[-1] not in ends
        if self._tree is not None:
            first_only = self._request.num_speculative_tokens is None
            lengths = self._request.lengths
            return Expected(*self._tree.walk(lengths, len(self._p), is_cut=is_cut, first_only=first_only))
        places = self._rules[rule]
        return walk(
            [place.accepted for place in places],
            [place.kept for place in places],
            self._request.lengths,
            is_cut=is_cut,
            first_only=self._request.num_speculative_tokens is None,
            undrafted=places[0].first,
            guesses=guesses,
        )

    def surprise(self) -> float:
        """The sum over its tokens, in nats."""
        answer = torch.tensor(self._request.output_token_ids)[:, None]  # [outputs, 1]
        return float(((self._p * self._z).sum(-1) - self._z.gather(-1, answer).squeeze(-1)).sum())

    def score(self, ends: Collection[int]) -> Score:
        rejection, match = self.counts("rejection", ends), self.counts("match", ends)
        return Score(rejection, match, self.surprise(), len(self._request.output_token_ids))


class Guess(NamedTuple):
    """Draft tokens that are certain, and how many of them the answer begins with from there on."""

    tokens: int
    right: int


class _Place(NamedTuple):
    """One place of a chain of drafts: a_t and b_t of each token of the answer, from the `first` one on that
    can be drafted there; and from that one on a_t of a token that is drafted alone."""

    first: int
    accepted: list[float]
    kept: list[float]
    single: list[float]


def walk(
    accepted: Sequence[Sequence[float]],
    kept: Sequence[Sequence[float]],
    lengths: Sequence[float],
    *,
    is_cut: bool,
    first_only: bool = False,
    undrafted: int = 0,
    guesses: Sequence[Guess | None] = (),
) -> Expected:
    """From a_t and b_t of each position of the answer, at each place of a chain of drafts; the last place
    stands for those behind it. `lengths`: the parts of the steps that draft at least 1, 2, ... tokens, which
    is 1 up to K where that is fixed; else whether a step drafts one more must not depend on where it is.

    `is_cut`: the answer ended at its longest length, for which the engine drafts no more than it can keep.
    Otherwise the last token ended it, and what was drafted behind that counts as drafted. `first_only`: of
    each step the first draft token alone is counted. `undrafted`: steps that start at one of so many first
    positions draft nothing. `guesses`: at each position, if there are any: a step that starts there offers
    these instead.
    """
    length = len(accepted[0])
    more = [now / before for before, now in pairwise([1.0, *lengths])]
    starts = [1.0] + [0.0] * (length + len(lengths) + 1)  # P(a step starts at t)
    drafted = expected = of_answer = 0.0
    for start in range(length):
        reached = starts[start]
        count = min(len(lengths), length - start - 1) if is_cut else len(lengths)
        if guesses and (guess := guesses[start]) is not None:
            count = min(count, guess.tokens)
            kept_now = min(guess.right, count)
            drafted += reached * count
            expected += reached * kept_now
            of_answer += reached * kept_now
            starts[start + kept_now + 1] += reached
            continue
        count = 0 if start < undrafted else count
        drafted += reached * sum(lengths[: min(count, 1) if first_only else count])
        for place in range(start, min(start + count, length)):
            of_chain = min(place - start, len(accepted) - 1)
            offered, b = reached * more[place - start], kept[of_chain][place]
            starts[place + 1] += reached - offered * b
            reached = offered * b
            if place == start or not first_only:
                expected += offered * accepted[of_chain][place]
                of_answer += reached
        starts[start + count + 1] += reached
    return Expected(sum(starts[:length]), drafted, expected, of_answer)
