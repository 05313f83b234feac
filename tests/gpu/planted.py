"""The known mistakes of speculative engines, planted into the kernels or into what they are given.

One of `tests/engine/verify` is missing: a residual that shares the draft's Gumbel noise. These kernels have
no Gumbel noise to share.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch
from driftguard_engine.kernels import verify as verify_kernels
from driftguard_engine.kernels.cuda import loader
from driftguard_engine.kernels.cuda.compiler import Source, read_sources

from tests.gpu.draws import Drafted, Mistake

# In verify.cu, each of them there exactly once.
EDITS: dict[str, tuple[str, str]] = {
    "accept shares the draft's noise": ("position + step, ACCEPT,", "position + step, DRAFT,"),
    "residual shares the draft's noise": (
        "positions[request] + step, RESIDUAL,",
        "positions[request] + step, DRAFT,",
    ),
    "residual from p": (
        "masses.residual = step < chain.length && chain.known(step);",
        "masses.residual = false;",
    ),
    "acceptance x 1.02": ("__dmul_rn(p_weight, q_normaliser)", "1.02 * __dmul_rn(p_weight, q_normaliser)"),
}
_UNUSED = ("VERIFICATION(bf16, Bf16)", "VERIFICATION(fp16, Fp16)")  # they take two thirds of the compilation


def edited_sources(edit: tuple[str, str]) -> list[Source]:
    sources = []
    for source in read_sources():
        if source.name == "verify.cu":
            text = source.text
            for old, new in (edit, *((line, "") for line in _UNUSED)):
                assert text.count(old) == 1, f"verify.cu has {old!r} {text.count(old)} times"
                text = text.replace(old, new)
            source = replace(source, text=text)
        sources.append(source)
    return sources


def mistaken_kernels(name: str, device: torch.device) -> loader.Kernels:
    """For float32 logits only."""
    with mock.patch.object(loader, "read_sources", return_value=edited_sources(EDITS[name])):
        return loader._load(device)


def q_before_top_k_p_after(drafted: Drafted) -> Drafted:
    """The draft's distribution as it was before top-k, though its tokens were drawn after."""
    space, settings = drafted.space, drafted.settings
    unfiltered = replace(
        settings,
        top_k=torch.zeros_like(settings.top_k),
        top_p=torch.ones_like(settings.top_p),
        narrows=False,
    )
    assert drafted.draft is not None
    steps = drafted.draft.shape[1]
    verify_kernels.find_distributions(
        drafted.launcher, drafted.draft, None, unfiltered, space.draft, steps, 0, space.meetings
    )
    return drafted


def draft_law_dropped(drafted: Drafted) -> Drafted:
    return replace(drafted, draft=None)


def greedy_draft_with_a_soft_q(drafted: Drafted) -> Drafted:
    """For scenarios whose distributions do not depend on the token before."""
    assert drafted.draft is not None
    drafted.space.draft_tokens.copy_(drafted.draft.argmax(-1))
    return drafted


GIVEN: dict[str, Mistake] = {
    "q before top-k, p after": q_before_top_k_p_after,
    "draft law dropped": draft_law_dropped,
    "greedy draft with a soft q": greedy_draft_with_a_soft_q,
}
