"""Other engines on the same two models, one request at temperature 1: tokens per second."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import GenerationConfig

from tests.gpu.check.loop.models import Models
from tests.gpu.check.rows import TRANSFORMERS, PeerSpeed

WARM_UP_TOKENS = 16
OWN_DRAFTS = (20, "constant", 0.4)  # its default settings


def transformers_assisted(models: Models, acceptance: float, drafts: int, tokens: int) -> list[PeerSpeed]:
    """As transformers comes, and with as many drafts as suit the engine best, drawn to the last."""
    return [_transformers(models, acceptance, how, tokens) for how in (OWN_DRAFTS, (drafts, "constant", 0.0))]


def _transformers(models: Models, acceptance: float, how: tuple[int, str, float], tokens: int) -> PeerSpeed:
    target, draft = models.target_module, models.draft_module(acceptance)
    count, schedule, threshold = how
    draft.generation_config.num_assistant_tokens = count
    draft.generation_config.num_assistant_tokens_schedule = schedule
    draft.generation_config.assistant_confidence_threshold = threshold
    _generate(models, target, draft, WARM_UP_TOKENS)
    seconds, made = _generate(models, target, draft, tokens)
    note = f"{count} drafts at most, {'its own settings' if how == OWN_DRAFTS else 'all of them drawn'}"
    return PeerSpeed(TRANSFORMERS, acceptance, made / seconds, note)


def transformers_alone(models: Models, tokens: int) -> PeerSpeed:
    """Without a draft."""
    _generate(models, models.target_module, None, WARM_UP_TOKENS)
    seconds, made = _generate(models, models.target_module, None, tokens)
    return PeerSpeed("transformers without a draft", None, made / seconds, "")


def _generate(models: Models, target: Any, draft: Any, tokens: int) -> tuple[float, int]:
    setting = models.setting
    prompt = models.contexts[: setting.prompt_tokens][None]
    wanted = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens, use_cache=True
    )
    torch.manual_seed(0)
    _finish(setting.device)
    begin = time.perf_counter()
    text = target.generate(
        prompt, attention_mask=torch.ones_like(prompt), generation_config=wanted, assistant_model=draft
    )
    _finish(setting.device)
    return time.perf_counter() - begin, text.shape[1] - prompt.shape[1]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
