"""Corpora of a hybrid, scored on held-out answers beside the draft model or head that stays.

Where a lookup finds a long match its guesses are kept as far as the answer goes on so, which is certain once
the answer is known; elsewhere the model's drafts are kept with the probabilities of
driftguard_training.serving. So the steps of a hybrid engine, which guesses or drafts for each row by itself,
are walked in expectation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import takewhile
from operator import eq

import torch
from driftguard_engine.drafters.corpus import packed
from driftguard_engine.drafters.suffix import Matches, SuffixDrafter

from driftguard_training.drafts.base import Draft
from driftguard_training.drafts.kinds import load_draft
from driftguard_training.errors import BadModelDirectory
from driftguard_training.lookup import Score, corpus_drafter, scored_segments, until
from driftguard_training.model_directories import LoadedModel, load_model
from driftguard_training.serving import DraftedAnswer, Guess, add_drafts, ends_of
from driftguard_training.settings import AcceptanceRule, EvaluateHybridSettings
from driftguard_training.teacher import read_answers
from driftguard_training.timing import seconds_in_turns, timed_pass
from driftguard_training.traffic import ServedRequest, read_fitting

_BATCH_REQUESTS = 8


@torch.no_grad()
def evaluate_hybrid(settings: EvaluateHybridSettings) -> dict[str, object]:
    """As `driftguard_training.lookup.evaluate_corpora`, of hybrids with each of these corpora: the time of a
    draft token is that of a lookup for each step, and of the model in the steps in which it drafts. Answers
    that are longer than the context of target or model are left out, and counted by segment in "left_out".
    "surprise" is as in `driftguard_training.evaluate`.

    Raises TrainingRefused.
    """
    target = load_model(settings.target, "target")
    model, k = load_draft(settings.draft, target), settings.num_speculative_tokens
    if model.tree is not None:
        raise BadModelDirectory(f"draft: {settings.draft} guesses trees, which no hybrid drafts with")
    context = min(target.context_tokens, model.context_tokens)
    read = read_fitting(settings.traffic, target.vocabulary, context)
    served = [
        ServedRequest(
            one.segment,
            one.prompt_token_ids,
            one.output_token_ids,
            settings.temperature,
            k,
            verification=settings.verification,
        )
        for one in read.requests
    ]
    vocabulary, ends = target.tokenizer.get_vocab(), ends_of(target)
    step, of_token = seconds_in_turns([timed_pass(target.model, k + 1), model.timed()])
    matches = Matches(least=settings.least_match)
    drafters = [corpus_drafter(directory, vocabulary, matches) for directory in settings.corpora]
    scores: list[list[Score]] = [[] for _ in drafters]
    surprise: list[float] = []
    places, drawn, lookups = 0, [0] * len(drafters), [0.0] * len(drafters)
    for start in range(0, len(served), _BATCH_REQUESTS):
        batch = served[start : start + _BATCH_REQUESTS]
        for request, answer in zip(batch, _answers(target, model, batch), strict=True):
            places += len(request.output_token_ids)
            surprise.append(answer.surprise() / len(request.output_token_ids))
            for number, drafter in enumerate(drafters):
                began = time.thread_time()
                guesses = _guesses(drafter, request, k)
                lookups[number] += time.thread_time() - began
                drawn[number] += guesses.count(None)
                scores[number].append(_score(answer, guesses, ends))
    return {
        "num_speculative_tokens": k,
        "temperature": settings.temperature,
        "surprise": surprise,
        "left_out": read.left_out(),
        "seconds_per_target_step": step,
        "drafts": [
            {
                "directory": None if directory is None else str(directory),
                "seconds_per_draft_token": lookups[number] / places / k + drawn[number] / places * of_token,
                "segments": scored_segments(served, scores[number], k),
            }
            for number, directory in enumerate(settings.corpora)
        ],
    }


def _answers(target: LoadedModel, model: Draft, batch: Sequence[ServedRequest]) -> list[DraftedAnswer]:
    told = read_answers(target.model, batch, model.features)
    rules: list[AcceptanceRule] = ["rejection"]
    answers = [DraftedAnswer(one, z, rules) for one, z in zip(batch, told.logits, strict=True)]
    add_drafts(answers, model, batch, told)
    return answers


def _guesses(drafter: SuffixDrafter, request: ServedRequest, k: int) -> list[Guess | None]:
    """At each token of the answer. None: the model drafts."""
    sequence, text = request.token_ids, packed(request.token_ids)
    found: list[Guess | None] = []
    for at in range(len(request.prompt_token_ids), len(sequence)):
        tokens = drafter.continuation(until(text, at), k)
        right = len(list(takewhile(bool, map(eq, tokens, sequence[at:]))))
        found.append(Guess(len(tokens), right) if tokens else None)
    return found


def _score(answer: DraftedAnswer, guesses: list[Guess | None], ends: frozenset[int]) -> Score:
    """kept: of guesses of one token, or of a token that the model drafts alone."""
    expected = answer.counts("rejection", ends, guesses)
    singles = answer.singles("rejection")
    kept = [
        single if guess is None else float(guess.right > 0)
        for single, guess in zip(singles, guesses, strict=True)
    ]
    return Score(statistics.fmean(kept), expected.steps, expected.drafted, expected.accepted)
