"""Corpora for drafting by lookup: made of captured answers, and scored on held-out ones.

Nothing is trained. A draft token that was looked up is kept where the target draws the same, so that a logged
answer tells what would have been kept of it, at any temperature, without a pass of the target.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np
from driftguard_engine.core import InvalidModel
from driftguard_engine.drafters.corpus import (
    MODEL_TYPE,
    TEXTS_FILE,
    TOKEN_BYTES,
    WEIGHTS_FILE,
    Corpus,
    packed,
    read_documents,
    vocabulary_hash,
)
from driftguard_engine.drafters.suffix import SEARCHED, Matches, SuffixDrafter
from driftguard_engine.models.loading import eos_token_ids
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from driftguard_training.errors import BadModelDirectory, TooLittleTraffic
from driftguard_training.model_directories import load_model, save_files
from driftguard_training.settings import CorpusSettings, EvaluateCorporaSettings
from driftguard_training.timing import seconds_in_turns, timed_pass
from driftguard_training.traffic import TrafficRequest, read_traffic

_TIMED_LOOKUPS = 300
_MOST_PLACES = 200


def make_corpus(settings: CorpusSettings) -> dict[str, object]:
    """Writes the corpus: answers of `train`, then of `replay`, in the order of the files, while they fit. One
    with a token that the tokenizer lacks is left out, and counted in "out_of_vocabulary".

    Returns what was made, with its version. Raises TrainingRefused: bad traffic, no tokenizer, an output that
    exists; nothing is written.
    """
    tokenizer = _tokenizer(settings.target)
    vocabulary = tokenizer.get_vocab()
    tokens = max(vocabulary.values()) + 1
    requests = _read(settings.train, settings.target, tokens)
    if settings.replay is not None:
        requests += _read(settings.replay, settings.target, tokens)
    documents: list[list[int]] = []
    texts: list[str] = []
    room, out_of_vocabulary = settings.most_tokens, 0
    for request in requests:
        document, text = request.output_token_ids, ""
        if settings.as_texts:
            told = tokenizer.decode(document, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            text = str(told)
            document = tokenizer.encode(text, add_special_tokens=False)
        if max(document, default=0) >= tokens:
            out_of_vocabulary += 1
        elif document and len(document) < room:
            room -= len(document) + 1
            documents.append(document)
            texts.append(text)
    if not documents:
        raise TooLittleTraffic(
            f"{settings.train}: no answer has fewer than {settings.most_tokens} tokens (--most-tokens) that "
            "the tokenizer has"
        )
    facts: dict[str, object] = {
        "documents": len(documents),
        "tokens": sum(len(document) for document in documents),
        "target": settings.target.name,
        "out_of_vocabulary": out_of_vocabulary,
    }

    def write(directory: Path) -> None:
        config = {"model_type": MODEL_TYPE, "vocabulary_sha256": vocabulary_hash(vocabulary), **facts}
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        flat = np.array([token for document in documents for token in document], np.int32)
        ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
        save_file({"token_ids": flat, "ends": ends}, directory / WEIGHTS_FILE)
        if settings.as_texts:
            lines = "".join(json.dumps(text) + "\n" for text in texts)
            (directory / TEXTS_FILE).write_text(lines, encoding="utf-8")

    version = save_files(settings.output, write, facts, others_may_read=False)  # it is captured text
    return {"event": "done", "output": str(settings.output), "version": version, **facts}


def evaluate_corpora(settings: EvaluateCorporaSettings) -> dict[str, object]:
    """What each corpus would have drafted, and what of it would have been accepted, in the same answers: as
    `driftguard_training.evaluate` prints it. None is no corpus, only the sequence itself.

    Times are in seconds: of a target step of one token, and what K draft tokens add to it, by K. With
    `single_tokens` they are null, and nothing is drafted.

    Raises TrainingRefused.
    """
    tokenizer = _tokenizer(settings.target)
    vocabulary = tokenizer.get_vocab()
    requests = _read(settings.traffic, settings.target, max(vocabulary.values()) + 1)
    ends = _ends(settings.target, tokenizer)
    k = settings.num_speculative_tokens
    seconds = None if settings.single_tokens else _step_seconds(settings.target, k)
    most = 0 if settings.single_tokens else k
    ngrams = settings.ngram_tokens
    matches = Matches() if ngrams is None else Matches.of_ngrams(*ngrams)
    drafts = []
    for directory in settings.corpora:
        drafter = corpus_drafter(directory, vocabulary, matches)
        scores = [
            Score(_kept(drafter, request), *_walk(drafter, request, most, ends)) for request in requests
        ]
        drafts.append(
            {
                "directory": None if directory is None else str(directory),
                "seconds_per_draft_token": seconds and _seconds(drafter, requests, scores, k, seconds),
                "segments": scored_segments(requests, scores, most),
            }
        )
    step = None if seconds is None else seconds[0]
    return {"num_speculative_tokens": k, "seconds_per_target_step": step, "drafts": drafts}


def _step_seconds(target: Path, k: int) -> tuple[float, float]:
    """Of the target, for one token and for k + 1; where a busy machine says that more tokens take less, the
    same."""
    model = load_model(target, "target").model
    one, more = seconds_in_turns([timed_pass(model, 1), timed_pass(model, k + 1)])
    return one, max(one, more)


def _seconds(
    drafter: SuffixDrafter,
    requests: Sequence[TrafficRequest],
    scores: Sequence[Score],
    k: int,
    step_seconds: tuple[float, float],
) -> float:
    """What a step with this drafter takes more than one of the target for one token, by K: a lookup, and the
    verification of as many tokens as it drafts (linear between none and K)."""
    drafted = sum(score.proposed for score in scores) / (k * sum(score.steps for score in scores))
    return (_lookup_seconds(drafter, requests, k) + drafted * (step_seconds[1] - step_seconds[0])) / k


@dataclass(frozen=True, slots=True)
class Score:
    """Of one answer. kept: the part of its tokens that a lookup behind the ones before drafts first."""

    kept: float
    steps: float
    proposed: float
    accepted: float


def _kept(drafter: SuffixDrafter, request: TrafficRequest) -> float:
    """Of at most _MOST_PLACES tokens of the answer, evenly apart."""
    sequence, text = request.token_ids, packed(request.token_ids)
    answer = range(len(request.prompt_token_ids), len(sequence))
    places = answer[:: -(-len(answer) // _MOST_PLACES)]
    right = sum(drafter.continuation(until(text, at), 1) == [sequence[at]] for at in places)
    return right / len(places)


def until(text: bytes, at: int) -> bytes:
    """As much of the sequence before this token as is searched."""
    return text[max(at - SEARCHED, 0) * TOKEN_BYTES : at * TOKEN_BYTES]


def _walk(
    drafter: SuffixDrafter, request: TrafficRequest, k: int, ends: Collection[int]
) -> tuple[int, int, int]:
    """(steps, draft tokens, accepted) of an engine that made this answer. It drafts no more than a cut answer
    can keep; behind a token that ends the answer it may."""
    sequence, text = request.token_ids, packed(request.token_ids)
    is_cut = sequence[-1] not in ends
    at, steps, drafted, accepted = len(request.prompt_token_ids), 0, 0, 0
    while at < len(sequence):
        most = min(k, len(sequence) - at - 1) if is_cut else k
        tokens = drafter.continuation(until(text, at), most)
        right = len(list(takewhile(bool, map(eq, tokens, sequence[at:]))))
        steps, drafted, accepted = steps + 1, drafted + len(tokens), accepted + right
        at += right + 1
    return steps, drafted, accepted


def scored_segments(
    requests: Sequence[TrafficRequest], scores: Sequence[Score], k: int
) -> list[dict[str, object]]:
    """What is called drafted is what K allows in these steps, so that corpora can be compared; what a lookup
    drafts of it is called proposed."""
    found: list[dict[str, object]] = []
    for segment in sorted({request.segment for request in requests}):
        pairs = [pair for pair in zip(requests, scores, strict=True) if pair[0].segment == segment]
        found.append(
            {
                "segment": segment,
                "positions": sum(len(request.output_token_ids) for request, _ in pairs),
                "steps": sum(score.steps for _, score in pairs),
                "kept": [score.kept for _, score in pairs],
                "drafted": [k * score.steps for _, score in pairs],
                "proposed": [score.proposed for _, score in pairs],
                "accepted": [score.accepted for _, score in pairs],
            }
        )
    return found


def _lookup_seconds(drafter: SuffixDrafter, requests: Sequence[TrafficRequest], k: int) -> float:
    """Median over lookups in the middle of answers, of the time in which the processor was theirs."""
    seconds = []
    for request in requests[:_TIMED_LOOKUPS]:
        middle = len(request.prompt_token_ids) + len(request.output_token_ids) // 2
        text = packed(request.token_ids[:middle])
        started = time.thread_time()
        drafter.continuation(text, k)
        seconds.append(time.thread_time() - started)
    return statistics.median(seconds)


def corpus_drafter(directory: Path | None, vocabulary: Mapping[str, int], matches: Matches) -> SuffixDrafter:
    """None is no corpus. Raises BadModelDirectory."""
    if directory is None:
        return SuffixDrafter(None, matches=matches)
    try:
        documents = read_documents(directory, vocabulary, field="corpus")
        return SuffixDrafter(Corpus(documents), matches=matches)
    except InvalidModel as error:
        raise BadModelDirectory(error.detail) from None


def _tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        told = str(error).strip().splitlines()[0]
        raise BadModelDirectory(
            f"target directory {directory}: its tokenizer cannot be loaded: {told}"
        ) from None
    return found


def _ends(directory: Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end an answer, as the engine finds them."""
    sources: list[Any] = [tokenizer]
    for name, kind in (("generation_config.json", GenerationConfig), ("config.json", AutoConfig)):
        if (directory / name).is_file():
            sources.append(kind.from_pretrained(directory))
    return eos_token_ids(*sources)


def _read(path: Path, target: Path, tokens: int) -> list[TrafficRequest]:
    """Of the tokens that the target has, which may be more than the `tokens` of its tokenizer: padded."""
    padded = 0
    if (target / "config.json").is_file():
        config = AutoConfig.from_pretrained(target).get_text_config()
        padded = int(getattr(config, "vocab_size", 0))
    return read_traffic(path, max(tokens, padded), sys.maxsize)
