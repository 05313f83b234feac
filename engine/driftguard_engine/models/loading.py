"""From a directory to a model that the engine can run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from driftguard_engine.core import InvalidModel
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.models import directory as directories
from driftguard_engine.models import generic, llama, llama_weights
from driftguard_engine.models.base import TokenModel
from driftguard_engine.models.plausible import check_weights

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """How a model is loaded.

    max_length: tokens per slot at most; spare: positions behind them that drafts may write to; lean: False
    forces the generic path; launcher: see `LlamaModel`.
    """

    dtype: torch.dtype
    device: torch.device
    slots: int
    max_length: int
    lean: bool = True
    spare: int = 0
    launcher: Launcher | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its slot cache; `name` is the hub name, or the directory's last component."""

    name: str
    directory: Path
    model: TokenModel
    tokenizer: Any
    eos_token_ids: frozenset[int]


def load(name: str, placement: Placement, *, field: str) -> LoadedModel:
    """Loads a local directory or hub name. Raises InvalidModel, which starts with `field`."""
    directory = directories.locate(name, field=field)
    tokenizer = load_tokenizer(directory, field)
    module = _load_module(directory, placement, field)
    check_weights(module, directory, field=field)
    config = module.config
    max_length = longest(config, placement)
    model: TokenModel
    lean = placement.lean and llama_weights.supports(config, max_length)
    if placement.device.type == "cpu":
        _leave_files(module, packed=lean)
    if lean:
        model = llama.LlamaModel(
            module, placement.slots, max_length, placement.spare, placement.launcher, emptied=True
        )
    else:
        try:
            model = generic.GenericModel(module, placement.slots, max_length)
        except ValueError as error:
            raise InvalidModel(
                f"{field}: {directory} ({config.model_type}) cannot serve: it {error}; a model that goes on "
                "from transformers' own cache is needed",
                field=field,
            ) from error
    logger.info("%s: %s runs on the %s path, context %d", field, directory, model.path, max_length)
    return LoadedModel(
        directories.shown_name(name, directory),
        directory,
        model,
        tokenizer,
        eos_token_ids(getattr(module, "generation_config", None), module.config, tokenizer),
    )


def _leave_files(module: Any, *, packed: bool) -> None:
    """Weights in the type of the files are pages of these: what is written over a file, as of the next model
    before a restart, would serve at once, and one that is cut off would end the process.

    packed: what is multiplied by is copied when the model is made, and not here too."""
    embedding = module.get_input_embeddings().weight
    for tensor in (*module.parameters(), *module.buffers()):
        if not packed or tensor.dim() < 2 or tensor is embedding:
            tensor.data = tensor.data.clone()


def longest(config: Any, placement: Placement) -> int:
    """Tokens per slot: the model's own context where it is shorter than the placement's."""
    return min(placement.max_length, context_of(config) or placement.max_length)


def context_of(config: Any) -> int | None:
    """The most tokens that a model of this configuration reads at once; None: it does not say."""
    told = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(told) if told else None


def load_tokenizer(directory: Path, field: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    except Exception as error:  # transformers raises errors of many types; all mean the same here
        raise InvalidModel(
            f"{field}: {directory} has no usable tokenizer ({_short(error)})", field=field
        ) from error


def _load_module(directory: Path, placement: Placement, field: str) -> Any:
    try:
        config = AutoConfig.from_pretrained(str(directory), trust_remote_code=False)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(directory),
            config=config,
            dtype=placement.dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # as above: unreadable weights, wrong shapes, unknown kinds
        raise InvalidModel(
            f"{field}: {directory} cannot be loaded as a causal language model ({_short(error)})", field=field
        ) from error
    module, report = loaded
    if report["missing_keys"]:
        # transformers would fill these with random numbers and serve noise.
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise InvalidModel(f"{field}: the weights in {directory} lack {missing}", field=field)
    return module.to(placement.device).eval()


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"


def eos_token_ids(*sources: Any) -> frozenset[int]:
    """The tokens that end an answer, by all of a generation config, a model's config and a tokenizer; None is
    none."""
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)


def check_same_tokenizer(target: Any, draft: Any, directory: Path, *, field: str) -> None:
    """Raises InvalidModel where a token id means another token to the draft than to the target."""
    ours: Mapping[str, int] = target.get_vocab()
    theirs: Mapping[str, int] = draft.get_vocab()
    if ours != theirs:
        different = sorted(ours.items() ^ theirs.items(), key=lambda pair: (pair[1], pair[0]))
        token, token_id = different[0]
        raise InvalidModel(
            f"{field}: {directory} has another tokenizer than the target ({len(theirs)} and {len(ours)} "
            f"tokens; the first difference is {token!r} = {token_id}); a draft must share the target's, "
            "except with --drafter tli or slem",
            field=field,
        )
    for name in SPECIAL_IDS:
        given, wanted = getattr(draft, name, None), getattr(target, name, None)
        if given != wanted:
            raise InvalidModel(
                f"{field}: {directory} has {name} {given}, the target {wanted}; a draft must share the "
                "target's special tokens",
                field=field,
            )
