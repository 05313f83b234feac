"""The training subprocess: distils, evaluates, scores; prints progress lines; ends with this process."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from driftguard.diagnosis.serving_gap import Expected
from driftguard.errors import DriftGuardError
from driftguard.masking import storable
from driftguard.records import UNREADABLE_JSON
from driftguard.retraining.training.child_process import tethered, was_killed

_POLL_SECONDS = 0.25  # how soon a request to stop is noticed
_ERROR_CHARACTERS = 500
_KILLED: Final = (-signal.SIGKILL, 128 + signal.SIGKILL)


class TrainingFailed(DriftGuardError):
    """The training process ended with an error; the message has its last line."""

    title = "Training failed"


class TrainingStopped(DriftGuardError):
    """The training was stopped on request, before it was done."""

    title = "Training stopped"


@dataclass(frozen=True, slots=True)
class Distillation:
    """One distillation: directories and files of the training process, see its --help."""

    target: Path
    draft: Path
    train: Path
    replay: Path | None
    held_out: Path
    output: Path
    steps: int
    seed: int
    threads: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scoring of `drafts`, all on the same traffic. `temperature` is what the traffic was sampled at,
    `acceptance_rule` that by which the server keeps draft tokens: rejection or match; `verification`: token
    or block."""

    target: Path
    drafts: Sequence[Path]
    traffic: Path
    num_speculative_tokens: int
    temperature: float
    acceptance_rule: str
    verification: str
    threads: int


@dataclass(frozen=True, slots=True)
class CorpusOrder:
    """A corpus of at most `most_tokens` of the answers of `train`, then of `replay`. `as_texts`: for a server
    that takes texts."""

    target: Path
    train: Path
    replay: Path | None
    output: Path
    most_tokens: int
    as_texts: bool


@dataclass(frozen=True, slots=True)
class CorporaEvaluation:
    """Scoring of `corpora` on the same traffic; None is no corpus. `single_tokens`, `ngram_tokens`: see
    --help."""

    target: Path
    corpora: Sequence[Path | None]
    traffic: Path
    num_speculative_tokens: int
    single_tokens: bool
    ngram_tokens: tuple[int, int] | None
    threads: int


@dataclass(frozen=True, slots=True)
class HybridEvaluation:
    """Scoring of corpora, each beside the same model. The rest as in Evaluation and CorporaEvaluation."""

    target: Path
    draft: Path
    corpora: Sequence[Path]
    traffic: Path
    least_match: int
    num_speculative_tokens: int
    temperature: float
    verification: str
    threads: int


@dataclass(frozen=True, slots=True)
class Scoring:
    """Scoring of served requests, each with its own K and temperature."""

    target: Path
    draft: Path
    traffic: Path
    threads: int


class Scored(msgspec.Struct, frozen=True):
    """Of one request, by its number in the file: expected counts by either rule, and the sum of its tokens'
    surprise."""

    number: int
    rejection: Expected
    match: Expected
    surprise: float
    tokens: int


def distil(
    order: Distillation,
    log: Path,
    on_progress: Callable[[dict[str, Any]], None],
    should_stop: Callable[[], bool],
) -> str:
    """Trains a candidate into `order.output`; returns its version. on_progress gets each report, as it was
    printed. Raises TrainingFailed, TrainingStopped."""
    # The plan has decided that the traffic suffices; part of it is held out, so the training's own
    # minimum, counted on the rest, would refuse what the setting allows.
    arguments = ["distill", "--minimum-requests", "1"]
    arguments += ["--target", str(order.target), "--draft", str(order.draft)]
    arguments += ["--train", str(order.train), "--output", str(order.output)]
    if order.replay is not None:
        arguments += ["--replay", str(order.replay)]
    arguments += ["--held-out", str(order.held_out)]
    arguments += ["--steps", str(order.steps), "--seed", str(order.seed), "--threads", str(order.threads)]
    return _made(arguments, order.output, log, should_stop, on_progress)


def make_corpus(order: CorpusOrder, log: Path, should_stop: Callable[[], bool]) -> str:
    """Makes a candidate in `order.output`; returns its version. Raises as `distil`."""
    arguments = ["corpus", "--target", str(order.target), "--train", str(order.train)]
    if order.replay is not None:
        arguments += ["--replay", str(order.replay)]
    arguments += ["--output", str(order.output), "--most-tokens", str(order.most_tokens)]
    arguments += ["--as-texts"] * order.as_texts
    return _made(arguments, order.output, log, should_stop)


def _made(
    arguments: Sequence[str],
    output: Path,
    log: Path,
    should_stop: Callable[[], bool],
    on_progress: Callable[[dict[str, Any]], None] = lambda _: None,
) -> str:
    version = None
    with closing(_run(arguments, log, should_stop)) as events:  # ends the process if on_progress fails
        for event in events:
            if event.get("event") == "done":
                version = str(event["version"])
            elif event.get("event") in ("progress", "held_out"):
                on_progress(event)
    if version is None or not output.is_dir():
        raise TrainingFailed(f"the training ended without a candidate; its log was: {_tail(log)}")
    return version


def evaluate(order: Evaluation, log: Path, should_stop: Callable[[], bool]) -> dict[str, Any]:
    """The measurements of all drafts, as the training process prints them. Raises as `distil`."""
    arguments = ["evaluate", "--target", str(order.target), "--traffic", str(order.traffic)]
    for draft in order.drafts:
        arguments += ["--draft", str(draft)]
    arguments += ["--num-speculative-tokens", str(order.num_speculative_tokens)]
    arguments += ["--temperature", str(order.temperature), "--threads", str(order.threads)]
    arguments += ["--acceptance-rule", order.acceptance_rule, "--verification", order.verification]
    return _measured(arguments, log, should_stop)


def evaluate_corpora(order: CorporaEvaluation, log: Path, should_stop: Callable[[], bool]) -> dict[str, Any]:
    """As `evaluate`."""
    arguments = ["evaluate-corpora", "--target", str(order.target), "--traffic", str(order.traffic)]
    for corpus in order.corpora:
        arguments += ["--corpus", "none" if corpus is None else str(corpus)]
    arguments += ["--num-speculative-tokens", str(order.num_speculative_tokens)]
    arguments += ["--single-tokens"] * order.single_tokens + ["--threads", str(order.threads)]
    if order.ngram_tokens is not None:
        arguments += ["--ngram-tokens", *map(str, order.ngram_tokens)]
    return _measured(arguments, log, should_stop)


def evaluate_hybrid(order: HybridEvaluation, log: Path, should_stop: Callable[[], bool]) -> dict[str, Any]:
    """As `evaluate`."""
    arguments = ["evaluate-hybrid", "--target", str(order.target), "--traffic", str(order.traffic)]
    arguments += ["--draft", str(order.draft), "--least-match", str(order.least_match)]
    for corpus in order.corpora:
        arguments += ["--corpus", str(corpus)]
    arguments += ["--num-speculative-tokens", str(order.num_speculative_tokens)]
    arguments += ["--temperature", str(order.temperature), "--verification", order.verification]
    return _measured([*arguments, "--threads", str(order.threads)], log, should_stop)


def _measured(arguments: Sequence[str], log: Path, should_stop: Callable[[], bool]) -> dict[str, Any]:
    events = list(_run(arguments, log, should_stop))
    if len(events) != 1 or "drafts" not in events[0]:
        raise TrainingFailed(f"the evaluation printed no measurements; its log was: {_tail(log)}")
    return events[0]


def score(order: Scoring, log: Path, should_stop: Callable[[], bool]) -> Iterator[Scored]:
    """As soon as each is scored. Raises as `distil`."""
    arguments = ["score", "--target", str(order.target), "--draft", str(order.draft)]
    arguments += ["--traffic", str(order.traffic), "--threads", str(order.threads)]
    with closing(_run(arguments, log, should_stop)) as events:
        for event in events:
            try:
                yield msgspec.convert(event, Scored)
            except msgspec.ValidationError as error:
                raise TrainingFailed(f"the scores cannot be read: {error}") from error


def _run(
    arguments: Sequence[str], log: Path, should_stop: Callable[[], bool]
) -> Generator[dict[str, Any], None, None]:
    """Yields each JSON object that the process prints. Raises TrainingFailed when it does not end with 0."""
    command = [sys.executable, "-P", "-m", "driftguard_training", *arguments]
    with log.open("ab") as errors, tethered(command, subprocess.PIPE, errors) as process:
        for line in _lines(process, should_stop):
            if line.strip():
                yield _decode(line)
        code = process.wait()
    if code in _KILLED:
        raise TrainingFailed(
            "the training process was killed by SIGKILL, as the kernel does where memory is short "
            f"(its own log says so); its log was: {_tail(log)}"
        )
    if code:
        raise TrainingFailed(f"the training process ended with code {code}: {_tail(log)}")


def _lines(process: subprocess.Popen[bytes], should_stop: Callable[[], bool]) -> Iterator[bytes]:
    output = process.stdout
    if output is None:
        raise ValueError("the process was started without a pipe for its output")
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while True:
            if should_stop():
                raise TrainingStopped("stopped on request")
            if was_killed(process):
                return
            if not selector.select(_POLL_SECONDS):
                continue
            block = os.read(output.fileno(), 65536)
            if not block:
                break
            *lines, pending = (pending + block).split(b"\n")
            yield from lines
    yield pending


def _decode(line: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except UNREADABLE_JSON as error:
        raise TrainingFailed(f"the training process printed {line[:80]!r}, not a JSON object") from error


def _tail(log: Path) -> str:
    lines = storable(log.read_text(encoding="utf-8", errors="replace")).strip().splitlines()
    return lines[-1][-_ERROR_CHARACTERS:] if lines else "(empty)"
