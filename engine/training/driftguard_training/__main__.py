"""python -m driftguard_training COMMAND (see --help of each)."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from driftguard_training.errors import TrainingRefused
from driftguard_training.settings import (
    MINIMUM_REQUESTS,
    CorpusSettings,
    DistillSettings,
    EvaluateCorporaSettings,
    EvaluateHybridSettings,
    EvaluateSettings,
    Loss,
    ScoreSettings,
    Verification,
)

NO_CORPUS = "none"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 for bad arguments, models or traffic, with one line on stderr (as argparse does)."""
    parsed = _parser().parse_args(arguments)
    # Threads that spin while they wait take CPU time from other processes and from each other: beside one
    # busy process on two cores, 40 steps took 57 s without spinning and more than 280 s with it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # OpenMP reads it when torch is loaded
    import torch  # here, so that --help does not wait for it
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if parsed.threads is not None:
        torch.set_num_threads(parsed.threads)
    try:
        _COMMANDS[parsed.command](parsed)
    except TrainingRefused as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    return 0


def _distill(parsed: argparse.Namespace) -> None:
    from driftguard_training.distill import distill

    distill(
        DistillSettings(
            target=parsed.target,
            draft=parsed.draft,
            train=parsed.train,
            replay=parsed.replay,
            held_out=parsed.held_out,
            output=parsed.output,
            steps=parsed.steps,
            seed=parsed.seed,
            learning_rate=parsed.learning_rate,
            loss=parsed.loss,
            batch_requests=parsed.batch_requests,
            minimum_requests=parsed.minimum_requests,
        ),
        _print_json,
    )


def _evaluate(parsed: argparse.Namespace) -> None:
    from driftguard_training.evaluate import evaluate

    settings = EvaluateSettings(
        parsed.target,
        tuple(parsed.draft),
        parsed.traffic,
        parsed.num_speculative_tokens,
        parsed.temperature,
        parsed.acceptance_rule,
        parsed.verification,
    )
    _print_json(evaluate(settings))


def _score(parsed: argparse.Namespace) -> None:
    from driftguard_training.serving import score

    for event in score(ScoreSettings(parsed.target, parsed.draft, parsed.traffic)):
        _print_json(event)


def _corpus(parsed: argparse.Namespace) -> None:
    from driftguard_training.lookup import make_corpus

    settings = CorpusSettings(
        parsed.target, parsed.train, parsed.output, parsed.replay, parsed.most_tokens, parsed.as_texts
    )
    _print_json(make_corpus(settings))


def _evaluate_corpora(parsed: argparse.Namespace) -> None:
    from driftguard_training.lookup import evaluate_corpora

    corpora = tuple(None if name == NO_CORPUS else Path(name) for name in parsed.corpus)
    ngram_tokens = None
    if parsed.ngram_tokens is not None:
        ngram_tokens = least, most = tuple(parsed.ngram_tokens)
        if least > most:
            raise TrainingRefused(f"--ngram-tokens {least} {most}: the least is more than the most")
    settings = EvaluateCorporaSettings(
        parsed.target,
        corpora,
        parsed.traffic,
        parsed.num_speculative_tokens,
        parsed.single_tokens,
        ngram_tokens,
    )
    _print_json(evaluate_corpora(settings))


def _evaluate_hybrid(parsed: argparse.Namespace) -> None:
    from driftguard_training.hybrid import evaluate_hybrid

    settings = EvaluateHybridSettings(
        parsed.target,
        parsed.draft,
        tuple(None if name == NO_CORPUS else Path(name) for name in parsed.corpus),
        parsed.traffic,
        parsed.least_match,
        parsed.num_speculative_tokens,
        parsed.temperature,
        parsed.verification,
    )
    _print_json(evaluate_hybrid(settings))


def _make_models(parsed: argparse.Namespace) -> None:
    from driftguard_training.make_models import make_models

    make_models(parsed.output, parsed.seed)


_COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "distill": _distill,
    "evaluate": _evaluate,
    "score": _score,
    "corpus": _corpus,
    "evaluate-corpora": _evaluate_corpora,
    "evaluate-hybrid": _evaluate_hybrid,
    "make-models": _make_models,
}


def _print_json(event: dict[str, object]) -> None:
    print(json.dumps(event), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m driftguard_training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_distill(commands.add_parser("distill", help="retrain a draft on captured traffic"))
    _add_evaluate(commands.add_parser("evaluate", help="score drafts on logged target output"))
    _add_score(commands.add_parser("score", help="what a faithful engine would have accepted of requests"))
    _add_corpus(commands.add_parser("corpus", help="make a corpus of captured answers"))
    _add_evaluate_corpora(commands.add_parser("evaluate-corpora", help="score corpora on logged answers"))
    _add_evaluate_hybrid(commands.add_parser("evaluate-hybrid", help="score the corpora of a hybrid"))
    make = commands.add_parser("make-models", help="make the bundled tokenizer, target, draft and head")
    make.add_argument("--output", type=Path, required=True, help="directory that gets the models")
    make.add_argument("--seed", type=_whole(0), default=0)
    for command in commands.choices.values():
        command.add_argument("--threads", type=_whole(1), help="CPU threads (default: torch's choice)")
    make.set_defaults(threads=2)  # the bytes of the models depend on it
    return parser


def _add_distill(parser: argparse.ArgumentParser) -> None:
    parser.description = "Progress is one JSON object per line on stdout. Traffic: JSON Lines of " + _TRAFFIC
    parser.add_argument("--target", type=Path, required=True, help="directory of the target")
    parser.add_argument("--draft", type=Path, required=True, help="draft model or heads to start from")
    parser.add_argument("--train", type=Path, required=True, help="captured traffic to learn")
    parser.add_argument("--replay", type=Path, help="older traffic, for a part of every batch")
    parser.add_argument("--held-out", type=Path, help="traffic on which the draft is measured meanwhile")
    parser.add_argument("--output", type=Path, required=True, help="new directory for the candidate")
    parser.add_argument("--steps", type=_whole(1), default=150)
    parser.add_argument("--seed", type=_whole(0), default=0)
    parser.add_argument("--learning-rate", type=_positive, default=1e-3)
    parser.add_argument("--loss", choices=get_args(Loss), default="nla", help="lk-hybrid for a cold start")
    parser.add_argument("--batch-requests", type=_whole(1), default=16)
    parser.add_argument("--minimum-requests", type=_whole(1), default=MINIMUM_REQUESTS, help="refuse below")


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.description = "Prints one JSON object. Traffic: JSON Lines of " + _TRAFFIC
    parser.add_argument("--target", type=Path, required=True, help="directory of the target")
    parser.add_argument("--draft", type=Path, required=True, action="append", help="may be repeated")
    parser.add_argument("--traffic", type=Path, required=True, help="logged target output")
    parser.add_argument("--num-speculative-tokens", type=_whole(1), default=4, help="draft K")
    parser.add_argument("--temperature", type=_not_negative, default=1.0, help="0 is greedy")
    parser.add_argument(
        "--acceptance-rule",
        choices=("rejection", "match"),
        default="rejection",
        help="rejection sampling of sampled drafts, or the likeliest token is drafted",
    )
    _add_verification(parser)


def _add_score(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints one JSON object per request. Traffic: JSON Lines of "
        + _TRAFFIC[:-1]
        + ', "temperature": float, "num_speculative_tokens": int}; where K varied, it is null, and '
        + '"drafting_steps" lists the parts of the steps that drafted at least 1, 2, ... tokens; '
        + '"verification" is "token", if it is not given, or "block"'
    )
    parser.add_argument("--target", type=Path, required=True, help="directory of the target")
    parser.add_argument("--draft", type=Path, required=True, help="directory of draft model or heads")
    parser.add_argument("--traffic", type=Path, required=True, help="served requests")


def _add_corpus(parser: argparse.ArgumentParser) -> None:
    parser.description = "Prints one JSON object. Traffic: JSON Lines of " + _TRAFFIC
    parser.add_argument("--target", type=Path, required=True, help="directory with the target's tokenizer")
    parser.add_argument("--train", type=Path, required=True, help="captured traffic, the most useful first")
    parser.add_argument("--replay", type=Path, help="older traffic, for the room that is left")
    parser.add_argument("--output", type=Path, required=True, help="new directory for the corpus")
    parser.add_argument("--most-tokens", type=_whole(1), default=1_000_000)
    parser.add_argument(
        "--as-texts", action="store_true", help="also as texts, for a server that takes these"
    )


def _add_evaluate_corpora(parser: argparse.ArgumentParser) -> None:
    parser.description = "Prints one JSON object. Traffic: JSON Lines of " + _TRAFFIC
    parser.add_argument("--target", type=Path, required=True, help="directory of the target")
    parser.add_argument(
        "--corpus", required=True, action="append", help=f"directory, or '{NO_CORPUS}'; may be repeated"
    )
    parser.add_argument("--traffic", type=Path, required=True, help="logged target output")
    parser.add_argument("--num-speculative-tokens", type=_whole(1), default=4, help="draft K")
    parser.add_argument(
        "--single-tokens",
        action="store_true",
        help="score no steps, and do not load and time the target: for a server that drafts in another way",
    )
    parser.add_argument(
        "--ngram-tokens",
        type=_whole(1),
        nargs=2,
        metavar=("LEAST", "MOST"),
        help="tokens of a match of n-gram lookup; without it suffix lookup is scored",
    )


def _add_evaluate_hybrid(parser: argparse.ArgumentParser) -> None:
    parser.description = "Prints one JSON object. Traffic: JSON Lines of " + _TRAFFIC
    parser.add_argument("--target", type=Path, required=True, help="directory of the target")
    parser.add_argument("--draft", type=Path, required=True, help="directory of draft model or EAGLE-3 head")
    parser.add_argument(
        "--corpus", required=True, action="append", help=f"directory, or '{NO_CORPUS}'; may be repeated"
    )
    parser.add_argument("--traffic", type=Path, required=True, help="logged target output")
    parser.add_argument(
        "--least-match", type=_whole(1), default=3, help="tokens of a match that is drafted from"
    )
    parser.add_argument("--num-speculative-tokens", type=_whole(1), default=4, help="draft K")
    parser.add_argument("--temperature", type=_not_negative, default=1.0, help="0 is greedy")
    _add_verification(parser)


def _add_verification(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verification",
        choices=get_args(Verification),
        default="token",
        help="what of sampled drafts is verified at once",
    )


_TRAFFIC = '{"segment": str, "prompt_token_ids": [int], "output_token_ids": [int]}'


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least {least}")
        return value

    return parse


def _not_negative(text: str) -> float:
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of at least 0")
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


if __name__ == "__main__":
    sys.exit(main())
