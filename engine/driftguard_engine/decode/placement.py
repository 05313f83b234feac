"""How models are placed for decoding, and the decoder."""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch

from driftguard_engine.config import EngineConfig, InvalidConfig
from driftguard_engine.core import InvalidModel
from driftguard_engine.decode.decoder import Decoder
from driftguard_engine.drafters.base import Drafter
from driftguard_engine.kernels.backend import backend_of
from driftguard_engine.kernels.verify import MOST_DRAFTS
from driftguard_engine.models.base import TokenModel
from driftguard_engine.models.loading import Placement

logger = logging.getLogger(__name__)


def runs_ahead(config: EngineConfig) -> bool:
    """Whether steps are meant to run ahead of the host: for a CPU there is nothing to hide behind a step."""
    return config.device == "cuda"


def placement_of(config: EngineConfig) -> Placement:
    """How models are loaded for this config. Where steps run ahead: with a spare slot, and spare positions in
    each slot.

    Raises InvalidConfig where a request may have more draft tokens than the device can verify.
    """
    ahead, device = runs_ahead(config), torch.device(config.device)
    if ahead and config.max_speculative_tokens > MOST_DRAFTS:
        raise InvalidConfig(
            f"max_speculative_tokens: {config.max_speculative_tokens} is more than the {MOST_DRAFTS} "
            "draft tokens that are verified at a time on the device"
        )
    return Placement(
        getattr(torch, config.dtype),
        device,
        config.max_batch + int(ahead),
        config.max_length,
        lean=config.model_path == "auto",
        spare=MOST_DRAFTS * int(ahead),
        launcher=backend_of(device).launcher,
    )


def open_decoder(
    config: EngineConfig, target: TokenModel, eos_token_ids: Collection[int], drafter: Drafter | None
) -> Decoder:
    """With the steps of the drafter prepared. Raises InvalidModel where memory runs out."""
    device = torch.device(config.device)
    backend = backend_of(device)
    decoder = Decoder(
        target,
        eos_token_ids,
        config.max_batch,
        config.max_speculative_tokens,
        device,
        backend.launcher,
        ahead=runs_ahead(config) and target.path == "lean" and backend.fallback is None,
        rule=config.verification,
    )
    try:
        for each in dict.fromkeys((None, drafter)):
            for shape in decoder.shapes(each):
                decoder.prepare(each, shape)
    except torch.OutOfMemoryError as error:
        raise InvalidModel(
            f"target: the device's memory has no room for the graphs of {config.max_batch} requests beside "
            f"the models and their caches ({error}); a smaller max_batch, max_length or "
            "max_speculative_tokens leaves more",
            field="target",
        ) from error
    return decoder


def slower_because(device: torch.device, target: TokenModel, drafter: Drafter | None) -> str | None:
    """Why steps on a GPU are slower than they could be; None: nothing is known, or there is no GPU."""
    if device.type != "cuda":
        return None
    by_model = {"target": target.kernels_obstacle, "draft": None if drafter is None else drafter.obstacle}
    found = [f"{name}: {why}" for name, why in by_model.items() if why is not None]
    if (fallback := backend_of(device).fallback) is not None:
        found.insert(0, fallback)
    return "; ".join(found) or None
