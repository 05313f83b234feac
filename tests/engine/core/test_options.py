"""What the command line leaves out is chosen for the device."""

from __future__ import annotations

import pytest
from driftguard_engine.options import (
    DeviceName,
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


def test_drafts_are_verified_token_by_token_unless_blocks_are_asked_for() -> None:
    def verified(models: ModelOptions) -> str:
        return engine_config(models, LimitOptions(), ServerOptions()).verification

    assert verified(ModelOptions()) == "token"
    assert verified(ModelOptions(verification=VerificationName.BLOCK)) == "block"
