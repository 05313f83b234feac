"""The settings of each command but make-models. Imports no torch, so that --help is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

AcceptanceRule = Literal["rejection", "match"]
Verification = Literal["token", "block"]
Loss = Literal["nla", "lk-hybrid", "forward-kl"]

MINIMUM_REQUESTS = 128  # measured: with 16 requests the draft became worse


@dataclass(frozen=True, slots=True)
class DistillSettings:
    """One distillation. `batch_requests` includes what is replayed. `held_out`: traffic on which the draft is
    measured now and then; it is not trained on."""

    target: Path
    draft: Path
    train: Path
    output: Path
    replay: Path | None = None
    held_out: Path | None = None
    steps: int = 150
    seed: int = 0
    learning_rate: float = 1e-3
    loss: Loss = "nla"
    batch_requests: int = 16
    minimum_requests: int = MINIMUM_REQUESTS


@dataclass(frozen=True, slots=True)
class EvaluateSettings:
    """`num_speculative_tokens` is K; `temperature` is the one that the traffic was sampled at.

    `acceptance_rule`: by rejection sampling of sampled drafts, or the likeliest token is drafted, and kept
    where the target draws the same. `verification`: of sampled drafts, token by token or as a block.
    """

    target: Path
    drafts: tuple[Path, ...]
    traffic: Path
    num_speculative_tokens: int = 4
    temperature: float = 1.0
    acceptance_rule: AcceptanceRule = "rejection"
    verification: Verification = "token"


@dataclass(frozen=True, slots=True)
class CorpusSettings:
    """A corpus of at most `most_tokens` for the tokenizer of `target`. `as_texts`: for a server that takes
    texts; the tokens are then those that encoding the text of each answer gives."""

    target: Path
    train: Path
    output: Path
    replay: Path | None = None
    most_tokens: int = 1_000_000
    as_texts: bool = False


@dataclass(frozen=True, slots=True)
class EvaluateCorporaSettings:
    """As EvaluateSettings. `corpora`: None is no corpus. `single_tokens`: of a server that looks up in
    another way, whose steps take as long whatever was found. `ngram_tokens`: least and most tokens of a match
    of n-gram lookup; None: suffix lookup."""

    target: Path
    corpora: tuple[Path | None, ...]
    traffic: Path
    num_speculative_tokens: int = 4
    single_tokens: bool = False
    ngram_tokens: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class EvaluateHybridSettings:
    """As EvaluateCorporaSettings, beside the model `draft`, which drafts where the longest match has fewer
    than `least_match` tokens."""

    target: Path
    draft: Path
    corpora: tuple[Path | None, ...]
    traffic: Path
    least_match: int
    num_speculative_tokens: int = 4
    temperature: float = 1.0
    verification: Verification = "token"


@dataclass(frozen=True, slots=True)
class ScoreSettings:
    """Served requests, each with its own K and temperature, and the models that are said to serve them."""

    target: Path
    draft: Path
    traffic: Path
