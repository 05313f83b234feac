"""Scores of served requests against every way in which a small engine could have served them, and against
what the built-in engine did."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args
from unittest import mock

import pytest
import torch
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import FinishedRequest, Request, SamplingParams
from driftguard_engine.engine import Engine
from driftguard_engine.models.speculators import head_kind
from driftguard_training.acceptance import distribution
from driftguard_training.corpus import prompts
from driftguard_training.drafts.kinds import load_draft
from driftguard_training.errors import BadTraffic
from driftguard_training.evaluate import evaluate
from driftguard_training.model_directories import load_model
from driftguard_training.serving import DraftedAnswer, Expected, Score, ends_of, score_batch, walk
from driftguard_training.settings import EvaluateSettings, Verification
from driftguard_training.traffic import ServedRequest, read_served

from tests.benchmarks.diagnosis.engine_figures import BUNDLED, changed, rounded
from tests.training.small_models import save_directory, small_model

KINDS = ("draft", "eagle3")
V, END, K, LONGEST = 3, 0, 2, 4  # the last: tokens of an answer
Answer = tuple[int, ...]
Rule = Literal["rejection", "match", "block"]
Law = Callable[[Answer], torch.Tensor]  # logits [V] after these tokens


def law(seed: int, *, ends_by_itself: bool) -> Law:
    """Other logits after every answer so far; `ends_by_itself`: END is certain at the LONGEST-th token."""

    def logits(so_far: Answer) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + hash(so_far) % 2**31)
        found = 1.5 * torch.randn(V, generator=generator, dtype=torch.float64)
        if ends_by_itself:
            found[END] = 60.0 if len(so_far) >= LONGEST - 1 else found[END]
        return found

    return logits


@dataclass(frozen=True, slots=True)
class Served:
    """One way in which an answer comes about."""

    probability: float
    answer: Answer
    drafted: int
    accepted: int
    first_drafted: int = 0
    first_accepted: int = 0


def ways(
    target: Law,
    draft: Law,
    temperature: float,
    *,
    is_cut: bool,
    rule: Rule = "rejection",
    lengths: Sequence[float] = (0.0, 0.0, 1.0),
) -> Iterator[Served]:
    """Every way: each length of a draft, each drafted token, each coin of the rule, each token of the
    target's own. `lengths`: probabilities of drafts of 0, 1, 2 tokens."""

    def p(so_far: Answer) -> list[float]:
        return distribution(target(so_far), temperature).tolist()

    def q(so_far: Answer) -> list[float]:
        return distribution(draft(so_far), temperature if rule != "match" else 0.0).tolist()

    def step(way: Served) -> Iterator[Served]:
        done = len(way.answer) >= LONGEST or (not is_cut and way.answer[-1:] == (END,))
        if done:
            yield way
            return
        for planned, part in enumerate(lengths):
            count = min(planned, LONGEST - len(way.answer) - 1) if is_cut else planned
            for drafts in itertools.product(range(V), repeat=count):
                chance = math.prod(q(way.answer + drafts[:place])[drafts[place]] for place in range(count))
                if part * chance:
                    yield from verified(way, drafts, part * chance)

    def verified_as_a_block(way: Served, drafts: Answer, chance: float) -> Iterator[Served]:
        """By Algorithm 2 itself: the longest run whose coin falls well."""
        ratio, ratios = 1.0, [1.0]
        for place, token in enumerate(drafts):
            before = way.answer + drafts[:place]
            ratio = min(ratio * p(before)[token] / q(before)[token], 1.0)
            ratios.append(ratio)
        longer_fail = 1.0
        for kept in range(len(drafts), -1, -1):
            before, ratio = way.answer + drafts[:kept], ratios[kept]
            left = [ratio * one for one in p(before)]
            if kept < len(drafts):
                left = [max(a - b, 0.0) for a, b in zip(left, q(before), strict=True)]
            passes = ratio
            if 0 < kept < len(drafts):
                passes = sum(left) / (sum(left) + 1 - ratio) if sum(left) else 0.0
            for token, own in enumerate(left):
                if weight := chance * longer_fail * passes * own / (sum(left) or 1.0):
                    yield from emitted_by(way, drafts, kept, token, weight)
            longer_fail *= 1 - passes

    def verified(way: Served, drafts: Answer, chance: float) -> Iterator[Served]:
        if rule == "block":
            yield from verified_as_a_block(way, drafts, chance)
            return
        for kept in range(len(drafts) + 1):
            before = way.answer + drafts[:kept]
            if kept:
                last = way.answer + drafts[: kept - 1]
                chance *= min(1.0, p(last)[drafts[kept - 1]] / q(last)[drafts[kept - 1]])
            law_of_own = p(before)
            rejected = 1.0
            if kept < len(drafts):
                token = drafts[kept]
                rejected = 1.0 - min(1.0, p(before)[token] / q(before)[token])
                left = [max(a - b, 0.0) for a, b in zip(p(before), q(before), strict=True)]
                law_of_own = [one / (sum(left) or 1.0) for one in left]
            for token, own in enumerate(law_of_own):
                if weight := chance * rejected * own:
                    yield from emitted_by(way, drafts, kept, token, weight)

    def emitted_by(way: Served, drafts: Answer, kept: int, token: int, weight: float) -> Iterator[Served]:
        emitted = (*drafts[:kept], token)
        if not is_cut and END in emitted:
            emitted = emitted[: emitted.index(END) + 1]
        yield from step(
            Served(
                way.probability * weight,
                way.answer + emitted,
                way.drafted + len(drafts),
                way.accepted + min(kept, len(emitted)),
                way.first_drafted + (len(drafts) > 0),
                way.first_accepted + (kept > 0),
            )
        )

    yield from step(Served(1.0, (), 0, 0))


def scored(
    answer: Answer,
    target: Law,
    draft: Law,
    temperature: float,
    *,
    is_cut: bool,
    rule: Rule = "rejection",
    drafting_steps: Sequence[float] = (),
    k: int = K,
) -> Score:
    logits = [torch.stack([of(answer[:place]) for place in range(len(answer))]) for of in (target, draft)]
    verification: Literal["token", "block"] = "block" if rule == "block" else "token"
    fixed = None if drafting_steps else k
    request = ServedRequest("", [1], list(answer), temperature, fixed, list(drafting_steps), verification)
    drafted = DraftedAnswer(request, logits[0].double())
    drafted.add(logits[1])
    drafted.end()
    return drafted.score(() if is_cut else (END,))


def expected_by(rule: Rule, score: Score) -> Expected:
    return score.match if rule == "match" else score.rejection


@pytest.mark.parametrize(
    ("rule", "temperature", "is_cut"),
    [
        *itertools.product(("rejection", "match"), (0.0, 0.7, 1.0), (True, False)),
        *itertools.product(["block"], (0.0, 0.7), [True]),
    ],
)
def test_scores_are_what_a_faithful_engine_drafts_and_accepts(
    rule: Rule, temperature: float, is_cut: bool
) -> None:
    target, draft = law(1, ends_by_itself=not is_cut), law(2, ends_by_itself=False)
    every = list(ways(target, draft, temperature, is_cut=is_cut, rule=rule))
    known = {
        answer: scored(answer, target, draft, temperature, is_cut=is_cut, rule=rule)
        for answer in {one.answer for one in every}
    }
    of_rule: dict[Answer, Expected] = {answer: expected_by(rule, one) for answer, one in known.items()}

    assert sum(one.probability for one in every) == pytest.approx(1.0)
    drafted, accepted = (
        sum(one.probability * getattr(one, name) for one in every) for name in ("drafted", "accepted")
    )
    assert accepted > 0.1
    for name, served in (
        ("drafted", drafted),
        ("accepted", accepted),
        ("accepted_of_answer", accepted),
    ):
        expected = sum(one.probability * getattr(of_rule[one.answer], name) for one in every)
        assert expected == pytest.approx(served, abs=1e-9)
    surprise = sum(one.probability * known[one.answer].surprise for one in every)
    assert surprise == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("rule", get_args(Rule))
def test_of_each_answer_by_itself_what_the_engine_accepts_is_known(rule: Rule) -> None:
    """Before the tokens were drawn it is not: the gap would be as noisy as the text."""
    target, draft = law(1, ends_by_itself=False), law(2, ends_by_itself=False)
    every = list(ways(target, draft, 1.0, is_cut=True, rule=rule))
    apart = 0.0
    for answer in {one.answer for one in every}:
        of_it = [one for one in every if one.answer == answer]
        weight = sum(one.probability for one in of_it)
        served = sum(one.probability * one.accepted for one in of_it) / weight
        known = expected_by(rule, scored(answer, target, draft, 1.0, is_cut=True, rule=rule))
        assert known.accepted_of_answer == pytest.approx(served, abs=1e-9)
        apart += weight * abs(known.accepted - served)
    assert apart > 0.1


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("rule", ["rejection", "match"])
def test_where_k_varies_the_first_draft_tokens_are_scored(rule: Rule, is_cut: bool) -> None:
    """A fifth of the steps drafts nothing, a half one token, and the others two."""
    target, draft = law(1, ends_by_itself=not is_cut), law(2, ends_by_itself=False)
    every = list(ways(target, draft, 0.7, is_cut=is_cut, rule=rule, lengths=(0.2, 0.5, 0.3)))
    known: dict[Answer, Expected] = {
        answer: expected_by(
            rule,
            scored(answer, target, draft, 0.7, is_cut=is_cut, rule=rule, drafting_steps=(0.8, 0.3)),
        )
        for answer in {one.answer for one in every}
    }
    for name, count in (
        ("drafted", "first_drafted"),
        ("accepted", "first_accepted"),
        ("accepted_of_answer", "first_accepted"),
    ):
        served = sum(one.probability * getattr(one, count) for one in every)
        expected = sum(one.probability * getattr(known[one.answer], name) for one in every)
        assert served > 0.1
        assert expected == pytest.approx(served, abs=1e-9)


@pytest.mark.parametrize(
    ("k", "steps"), [(None, []), (4, [1.0]), (None, [0.5, 0.6]), (None, [0.0]), (None, [1.1]), (0, [])]
)
def test_a_request_that_does_not_tell_its_drafts_is_refused_by_its_line(
    tmp_path: Path, k: int | None, steps: list[float]
) -> None:
    line = {"segment": "", "prompt_token_ids": [1], "output_token_ids": [1], "temperature": 1.0}
    file = tmp_path / "served.jsonl"
    file.write_text(json.dumps({**line, "num_speculative_tokens": k, "drafting_steps": steps}))
    with pytest.raises(BadTraffic, match=r"line 1: .*(num_speculative_tokens|drafting_steps|int|float)"):
        read_served(file)


def test_a_block_of_three_is_scored_and_accepts_more_than_its_tokens_one_by_one() -> None:
    target, draft = law(3, ends_by_itself=False), law(4, ends_by_itself=False)
    every = list(ways(target, draft, 1.0, is_cut=True, rule="block", lengths=(0.0, 0.0, 0.0, 1.0)))
    served, by_block, by_token = 0.0, 0.0, 0.0
    known: dict[tuple[Answer, Rule], Expected] = {}
    for one in every:
        for rule in ("block", "rejection"):
            if (one.answer, rule) not in known:
                score = scored(one.answer, target, draft, 1.0, is_cut=True, rule=rule, k=3)
                known[one.answer, rule] = score.rejection
        served += one.probability * one.accepted
        by_block += one.probability * known[one.answer, "block"].accepted
        by_token += one.probability * known[one.answer, "rejection"].accepted
    assert by_block == pytest.approx(served, abs=1e-9)
    assert by_token < served - 0.02


def test_the_rules_differ_but_for_greedy_requests() -> None:
    target, draft = law(1, ends_by_itself=False), law(2, ends_by_itself=False)
    answer = (1, 2, 1, 1)
    greedy = scored(answer, target, draft, 0.0, is_cut=True)
    assert greedy.rejection == greedy.match
    warm = scored(answer, target, draft, 1.0, is_cut=True)
    assert abs(warm.rejection.accepted - warm.match.accepted) > 0.05


def test_a_walk_by_the_acceptance_of_each_place_alone_would_not_be_exact() -> None:
    """Which token came of a place tells whether it was drafted: the planted defect is seen."""
    target, draft = law(1, ends_by_itself=False), law(2, ends_by_itself=False)
    every = list(ways(target, draft, 1.0, is_cut=True))
    served = sum(one.probability * one.accepted for one in every)
    wrong = 0.0
    for one in every:
        pairs = [
            (distribution(target(one.answer[:t]), 1.0), distribution(draft(one.answer[:t]), 1.0))
            for t in range(LONGEST)
        ]
        rates = [float(torch.minimum(*pair).sum()) for pair in pairs]
        wrong += one.probability * walk([rates], [rates], [1.0] * K, is_cut=True).accepted
    assert abs(wrong - served) > 1e-3


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_answers_of_another_target_surprise(temperature: float) -> None:
    target, draft, other = (law(seed, ends_by_itself=False) for seed in (1, 2, 3))
    surprise = sum(
        one.probability * scored(one.answer, target, draft, temperature, is_cut=True).surprise
        for one in ways(other, draft, temperature, is_cut=True)
    )
    assert surprise / LONGEST > 0.2


def served(
    draft: Path,
    temperature: float,
    *,
    adaptive: bool = False,
    verification: Verification = "token",
    max_tokens: int = 32,
) -> list[FinishedRequest]:
    """What the built-in engine makes of 24 prompts."""
    config = EngineConfig(
        str(BUNDLED / "target"),
        str(draft),
        head_kind(draft) or "draft_model",
        threads=1,
        max_batch=8,
        num_speculative_tokens=4,
        adaptive_k=adaptive,
        verification=verification,
    )
    with mock.patch("driftguard_engine.models.loading.check_weights", return_value=None):
        engine = Engine(config)
    done: dict[str, FinishedRequest] = {}
    texts = prompts("python", 24, 5, characters=120)
    for number, text in enumerate(texts):
        tokens = tuple(engine.tokenizer.encode(text, add_special_tokens=False))
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=number)
        engine.submit(Request(str(number), tokens, params, datetime.now(UTC)))
    while engine.has_work():
        for output in engine.step():
            if output.finished is not None:
                done[output.request_id] = output.finished
    return [done[str(number)] for number in range(len(texts))]


def first_gaps(requests: list[FinishedRequest]) -> list[tuple[float, float]]:
    """The same of the first draft tokens, of requests whose K varied."""
    target = load_model(BUNDLED / "target", "target")
    models = target, load_draft(BUNDLED / "draft", target)
    asked = [
        ServedRequest(
            "",
            list(one.request.prompt_token_ids),
            list(one.output_token_ids),
            one.request.params.temperature,
            None,
            [drafted / one.counts.steps for drafted in one.counts.drafted_per_position],
        )
        for one in requests
    ]
    found = score_batch(*models, asked)
    return [
        (
            one.counts.drafted_per_position[0] - score.rejection.drafted,
            one.counts.accepted_per_position[0] - score.rejection.accepted_of_answer,
        )
        for one, score in zip(requests, found, strict=True)
    ]


def gaps(
    requests: list[FinishedRequest], kind: str = "draft", verification: Verification | None = None
) -> list[tuple[float, float]]:
    """(drafted, accepted) less what the bundled models account for, of each request."""
    target = load_model(BUNDLED / "target", "target")
    models = target, load_draft(BUNDLED / kind, target)
    asked = [
        ServedRequest(
            "",
            list(one.request.prompt_token_ids),
            list(one.output_token_ids),
            one.request.params.temperature,
            4,
            verification=verification or ("block" if one.verification == "block" else "token"),
        )
        for one in requests
    ]
    found = [
        one for start in range(0, len(asked), 8) for one in score_batch(*models, asked[start : start + 8])
    ]
    return [
        (
            one.counts.drafted - score.rejection.drafted,
            one.counts.accepted - score.rejection.accepted_of_answer,
        )
        for one, score in zip(requests, found, strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_acceptance_that_is_evaluated_is_what_the_engine_counts(tmp_path: Path, kind: str) -> None:
    finished, traffic = served(BUNDLED / kind, 0.0), tmp_path / "traffic.jsonl"
    with traffic.open("w") as file:
        for one in finished:
            tokens = {
                "prompt_token_ids": one.request.prompt_token_ids,
                "output_token_ids": one.output_token_ids,
            }
            print(json.dumps({"segment": "", **tokens}), file=file)
    report = evaluate(EvaluateSettings(BUNDLED / "target", (BUNDLED / kind,), traffic, 4, 0.0))
    draft = report["drafts"][0]  # type: ignore[index]
    (segment,) = draft["segments"]
    drafted, accepted, steps = (
        sum(getattr(one.counts, name) for one in finished) for name in ("drafted", "accepted", "steps")
    )
    assert segment["acceptance"] == pytest.approx(accepted / drafted)
    assert segment["steps"] == pytest.approx(steps)
    assert draft["seconds_per_draft_token"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_accepts_what_its_models_account_for(kind: str) -> None:
    greedy = gaps(served(BUNDLED / kind, 0.0), kind)
    assert max(abs(gap) for pair in greedy for gap in pair) < 1e-6
    sampled = torch.tensor(gaps(served(BUNDLED / kind, 0.7), kind))
    error = sampled.std(dim=0) / len(sampled) ** 0.5
    assert (sampled.mean(dim=0).abs() < 3 * error).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_accepts_by_blocks_what_its_models_account_for(kind: str) -> None:
    finished = served(BUNDLED / kind, 1.0, verification="block", max_tokens=128)
    sampled = torch.tensor(gaps(finished, kind))
    error = sampled.std(dim=0) / len(sampled) ** 0.5
    assert (sampled.mean(dim=0).abs() < 3 * error).all()
    by_token = torch.tensor(gaps(finished, kind, "token"))
    assert by_token.mean(dim=0)[1] > 3 * by_token.std(dim=0)[1] / len(by_token) ** 0.5


def test_a_quantised_draft_accepts_less_than_the_registered_one_accounts_for(tmp_path: Path) -> None:
    draft = changed(BUNDLED / "draft", rounded(3), tmp_path)
    accepted = torch.tensor([gap[1] for gap in gaps(served(draft, 0.7))])
    assert accepted.mean() < -3 * accepted.std() / len(accepted) ** 0.5


def test_with_adaptive_k_the_engine_accepts_of_first_tokens_what_its_models_account_for() -> None:
    varied = [one for one in served(BUNDLED / "draft", 0.7, adaptive=True) if one.counts.drafted]
    assert len({one.counts.drafted / one.counts.steps for one in varied}) > len(varied) / 2
    found = torch.tensor(first_gaps(varied))
    error = found.std(dim=0) / len(found) ** 0.5
    assert (found.mean(dim=0).abs() < 3 * error).all()


def test_an_answer_ends_with_every_token_that_ends_one_in_the_engine(tmp_path: Path) -> None:
    """Also where the configuration of the model names another one than that of its sampling."""
    directory = save_directory(tmp_path / "target", small_model(1))
    for name, ends in (("config.json", 3), ("generation_config.json", [4, 5])):
        told = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(told | {"eos_token_id": ends}))
    assert ends_of(load_model(directory, "target")) == {0, 3, 4, 5}  # 0: of the tokenizer
