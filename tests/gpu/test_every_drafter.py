"""Every drafter on a device: requests get what they get where the reference verifies."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from driftguard_engine.config import VerificationRule
from driftguard_engine.core import Request
from driftguard_engine.decode import placement
from driftguard_engine.kernels.backend import Backend

from tests.engine.core.every_drafter import AHEAD, CASES, PROMPT, TREES, engine_of, save_letters
from tests.engine.core.test_decoder import told
from tests.engine.core.tiny import request, serve
from tests.gpu.test_device_loop import DEVICE, failed_capture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

OF_A_DEVICE = [name for name in CASES if name not in AHEAD]  # those draft on the CPU
RULES = get_args(VerificationRule)
SMALL: dict[str, Any] = {"max_batch": 4, "prefill_chunk_tokens": 8}


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("msgspec", reason="corpora are made by the training, which needs msgspec")
    return save_letters(tmp_path_factory.mktemp("letters"))


def asked() -> list[Request]:
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.2, "top_k": 2},
        {"temperature": 1.0, "top_p": 0.7, "num_speculative_tokens": 4},
        {"num_speculative_tokens": 0},
        {"temperature": 1.0, "ignore_eos": False},
    ]
    return [
        request(str(number), PROMPT[: number + 1], 24, seed=number, **way) for number, way in enumerate(ways)
    ]


@pytest.mark.parametrize(
    ("name", "rule"),
    [(name, rule) for name in OF_A_DEVICE for rule in RULES if rule == "token" or name not in TREES],
)
def test_kernels_and_reference_give_the_same(
    letters: Path, monkeypatch: pytest.MonkeyPatch, name: str, rule: VerificationRule
) -> None:
    chosen: dict[str, Any] = {"device": DEVICE, "verification": rule} | SMALL
    engine = engine_of(letters, name, **chosen)
    assert engine.backend == DEVICE
    drafter = engine._drafts.drafter
    if drafter is None or drafter.captured:
        assert failed_capture(engine) is None
    found = {each: told(done) for each, done in serve(engine, *asked()).items()}
    plain = serve(engine_of(letters, "none", **chosen), *asked())
    for one in asked():
        if one.params.temperature == 0:
            assert found[one.request_id][0] == plain[one.request_id].output_token_ids
    monkeypatch.setattr(placement, "backend_of", lambda _: Backend(None, "planted"))
    by_reference = serve(engine_of(letters, name, **chosen), *asked())
    assert found == {each: told(done) for each, done in by_reference.items()}
