"""How one engine is set up. Imports nothing of ours."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Literal, get_args

HEADS = ("eagle3", "eagle", "mtp", "peagle", "dflash", "dspark")  # of a target, in the layout of speculators
DRAFTERS = (
    "draft_model",
    *HEADS,
    "medusa",
    "streaming",
    "ngram",
    "suffix",
    "hybrid",
    "lookahead",
    "ssd",
    "mirror",
    "tli",
    "slem",
    "none",
)
DRAFTS_AHEAD = ("ssd", "mirror")  # with a draft model, in a second process
OTHER_VOCABULARY = ("tli", "slem")  # with a draft model of any tokenizer
DRAFTERS_GROUP = "driftguard_engine.drafters"  # of entry points: further drafters, of installed packages
ModelPath = Literal["auto", "generic"]
Device = Literal["cpu", "cuda"]
VerificationRule = Literal["token", "block"]
DTYPES = ("float32", "bfloat16", "float16")
MOST_DRAFTS_OF_A_RECORD = 1_024  # the sidecar refuses records of a larger K


class InvalidConfig(ValueError):
    """{field}: {what was given and what would be right}"""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every choice of one engine; checked when made, InvalidConfig names the field.

    drafter: one of DRAFTERS, or the name of an installed one.
    target, draft: local directories or hub names. The drafters "draft_model", "ssd" and "mirror" need a draft
    model, "tli" and "slem" one of any tokenizer, each of HEADS, "medusa" and "streaming" what was trained of
    its kind for the target, "hybrid" a draft model or one of HEADS, "suffix" and "ngram" may have a corpus.
    "mtp" without one drafts with the layer in the target's own checkpoint.
    corpus: directory of a corpus, beside the draft of "hybrid".
    max_batch: slots, the most requests that run at once. max_length: tokens per slot, prompt and output
    together; the model's own context wins where it is shorter. max_waiting: requests queued for a slot.
    num_speculative_tokens: K where a request does not say; max_speculative_tokens: the most it may ask for.
    adaptive_k: K of a step is chosen by measured acceptance and step times, and is 0 where speculation does
    not pay; the two above are then upper bounds. A seeded request at a temperature above 0 then draws tokens
    that depend on the load.
    verification: the rule by which drafts are accepted, see `verify`. "block" accepts as many as "token" or
    more.
    ngram_min_tokens, ngram_max_tokens: length of the suffix that n-gram lookup matches.
    lookahead_window, lookahead_ngram, lookahead_candidates: W, N and G of lookahead decoding: columns of the
    window, tokens of an n-gram, and n-grams that a step guesses at most.
    suffix_past_tokens: the newest tokens of ended requests that "suffix" and "hybrid" look up in too; 0 is
    off. A seeded request at a temperature above 0 then draws tokens that depend on what ran before.
    suffix_min_match: where the longest match has fewer tokens, the model of "hybrid" drafts.
    prepared_outcomes: of each verification of a request, "ssd" and "mirror" draft for so many outcomes ahead;
    the draft's cache has so many further slots for each of max_batch. exit_layer: the layer of the target
    whose input "mirror" chooses them by, from 1 on; None: behind three quarters.
    model_path: "generic" runs every model through transformers' own forward; "auto" does so only for models
    that the lean path cannot compute.
    prefix_reuse: where a prompt begins like an earlier one, the whole chunks of prefill_chunk_tokens that
    they share are not read again, as long as a slot still holds them.
    threads: torch's CPU threads; None leaves torch's own choice.
    state_dir: directory in which the draft in service is kept over restarts; None keeps nothing.
    """

    target: str
    draft: str | None = None
    drafter: str = "draft_model"
    dtype: str = "float32"
    device: Device = "cpu"
    max_batch: int = 8
    max_length: int = 2048
    num_speculative_tokens: int = 4
    max_speculative_tokens: int = 16
    adaptive_k: bool = False
    verification: VerificationRule = "token"
    max_waiting: int = 1024
    prefill_chunk_tokens: int = 128
    prefix_reuse: bool = True
    ngram_min_tokens: int = 2
    ngram_max_tokens: int = 4
    lookahead_window: int = 5
    lookahead_ngram: int = 4
    lookahead_candidates: int = 3
    suffix_past_tokens: int = 0
    suffix_min_match: int = 3
    prepared_outcomes: int = 4
    exit_layer: int | None = None
    model_path: ModelPath = "auto"
    threads: int | None = None
    speculation: bool = True
    corpus: str | None = None
    state_dir: Path | None = None
    server_name: str = "engine"

    def __post_init__(self) -> None:
        for name in ("max_batch", "num_speculative_tokens", "max_speculative_tokens", "max_waiting"):
            _at_least(name, getattr(self, name), 1)
        for name in ("prefill_chunk_tokens", "ngram_min_tokens", "suffix_min_match", "prepared_outcomes"):
            _at_least(name, getattr(self, name), 1)
        _at_least("lookahead_window", self.lookahead_window, 1)
        _at_least("lookahead_candidates", self.lookahead_candidates, 1)
        _at_least("lookahead_ngram", self.lookahead_ngram, 3)
        _at_least("suffix_past_tokens", self.suffix_past_tokens, 0)
        _at_least("max_length", self.max_length, 2)
        _at_least("ngram_max_tokens", self.ngram_max_tokens, self.ngram_min_tokens)
        _at_least("max_speculative_tokens", self.max_speculative_tokens, self.num_speculative_tokens)
        if self.max_speculative_tokens > MOST_DRAFTS_OF_A_RECORD:
            raise InvalidConfig(
                f"max_speculative_tokens: {self.max_speculative_tokens} is more than the "
                f"{MOST_DRAFTS_OF_A_RECORD} draft tokens of a step that a record may tell"
            )
        if self.threads is not None:
            _at_least("threads", self.threads, 1)
        if self.dtype not in DTYPES:
            raise InvalidConfig(f"dtype: {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.device not in ("cpu", "cuda"):
            raise InvalidConfig(f"device: {self.device!r} is not one of cpu, cuda")
        if self.drafter not in DRAFTERS and self.drafter not in installed_drafters():
            known = ", ".join((*DRAFTERS, *sorted(installed_drafters())))
            raise InvalidConfig(f"drafter: {self.drafter!r} is not one of {known}")
        if self.verification not in get_args(VerificationRule):
            known = ", ".join(get_args(VerificationRule))
            raise InvalidConfig(f"verification: {self.verification!r} is not one of {known}")
        if self.suffix_past_tokens and self.drafter not in ("suffix", "hybrid"):
            raise InvalidConfig(
                f"suffix_past_tokens: given with the drafter {self.drafter!r}, but only 'suffix' and "
                "'hybrid' look up in past outputs"
            )
        if self.corpus is not None and self.drafter != "hybrid":
            raise InvalidConfig(
                f"corpus: given with the drafter {self.drafter!r}, but only 'hybrid' has a corpus beside its "
                "draft; 'suffix' and 'ngram' take it as draft"
            )
        if self.draft is not None and self.drafter in ("lookahead", "none"):
            raise InvalidConfig(
                f"draft: given with the drafter {self.drafter!r}, which takes none; leave out --draft, or "
                "choose a drafter that takes it"
            )
        if self.drafter in DRAFTS_AHEAD and self.device != "cpu":
            raise InvalidConfig(
                f"drafter: {self.drafter!r} drafts in a second process on the CPU, not yet with the device "
                f"{self.device!r}; 'draft_model' gives the same output there"
            )
        if self.drafter in DRAFTS_AHEAD and not hasattr(os, "memfd_create"):
            raise InvalidConfig(f"drafter: {self.drafter!r} shares memory between processes as Linux does")
        if self.exit_layer is not None and self.drafter != "mirror":
            raise InvalidConfig(
                f"exit_layer: given with the drafter {self.drafter!r}, but only 'mirror' reads one"
            )
        drawn = ("draft_model", *HEADS, "medusa", "streaming", "hybrid", *DRAFTS_AHEAD, *OTHER_VOCABULARY)
        if self.drafter in drawn and self.drafter != "mtp" and not self.draft:
            raise InvalidConfig(
                f"draft: missing; the drafter {self.drafter!r} needs a draft directory or hub name"
            )


def installed_drafters() -> dict[str, EntryPoint]:
    """By name. Of two packages with the same name the one that is first on the path counts."""
    found = entry_points(group=DRAFTERS_GROUP)
    return {name: found[name] for name in found.names}


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidConfig(f"{name}: {value!r} is not a whole number of at least {least}")
