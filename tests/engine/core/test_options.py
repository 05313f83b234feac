"""What the command line leaves out is chosen for the device."""

from __future__ import annotations

import pytest
from driftguard_engine.options import (
    BUNDLED,
    DeviceName,
    DrafterName,
    DtypeName,
    LimitOptions,
    ModelOptions,
    ServerOptions,
    VerificationName,
    engine_config,
)


@pytest.mark.parametrize(
    ("device", "given", "served"),
    [
        (DeviceName.CPU, None, "float32"),
        (DeviceName.CUDA, None, "bfloat16"),
        (DeviceName.CUDA, DtypeName.FLOAT32, "float32"),
        (DeviceName.CPU, DtypeName.BFLOAT16, "bfloat16"),
    ],
)
def test_the_number_format_is_bfloat16_on_cuda_and_float32_on_the_cpu_unless_given(
    device: DeviceName, given: DtypeName | None, served: str
) -> None:
    models = ModelOptions(device=device, dtype=given)
    assert engine_config(models, LimitOptions(), ServerOptions()).dtype == served


def test_the_sizes_of_lookahead_reach_the_engine() -> None:
    models = ModelOptions(drafter="lookahead", lookahead_window=9, lookahead_ngram=3, lookahead_candidates=2)
    found = engine_config(models, LimitOptions(), ServerOptions())
    assert (found.lookahead_window, found.lookahead_ngram, found.lookahead_candidates) == (9, 3, 2)


def test_drafts_are_verified_token_by_token_unless_blocks_are_asked_for() -> None:
    def verified(models: ModelOptions) -> str:
        return engine_config(models, LimitOptions(), ServerOptions()).verification

    assert verified(ModelOptions()) == "token"
    assert verified(ModelOptions(verification=VerificationName.BLOCK)) == "block"


@pytest.mark.parametrize(
    ("drafter", "draft"),
    [
        (None, "draft"),
        (DrafterName.DRAFT_MODEL, "draft"),
        (DrafterName.EAGLE3, "eagle3"),
        (DrafterName.MEDUSA, "medusa"),
        (DrafterName.STREAMING, "streaming"),
        (DrafterName.NGRAM, None),
        (DrafterName.SUFFIX, None),
        (DrafterName.HYBRID, "draft"),
        (DrafterName.LOOKAHEAD, None),
        (DrafterName.NONE, None),
    ],
)
def test_the_bundled_target_has_a_draft_of_each_kind(drafter: DrafterName | None, draft: str | None) -> None:
    found = engine_config(ModelOptions(drafter=drafter), LimitOptions(), ServerOptions()).draft
    assert found == (None if draft is None else str(BUNDLED / draft))
