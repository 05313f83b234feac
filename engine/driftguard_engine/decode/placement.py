"""Which loop decodes: the one whose state is on the device, or the host's."""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch

from driftguard_engine.config import EngineConfig, InvalidConfig
from driftguard_engine.core import InvalidModel
from driftguard_engine.decode.base import StepDecoder
from driftguard_engine.decode.decoder import DeviceDecoder, check_drafter, llama_of
from driftguard_engine.decode.host_decoder import HostDecoder
from driftguard_engine.drafters.base import Drafter
from driftguard_engine.drafters.draft_model import DraftModelDrafter
from driftguard_engine.kernels.backend import backend_of
from driftguard_engine.kernels.verify import MOST_DRAFTS
from driftguard_engine.models.base import TokenModel
from driftguard_engine.models.llama import LlamaModel
from driftguard_engine.models.loading import Placement

logger = logging.getLogger(__name__)


def placement_of(config: EngineConfig) -> Placement:
    """How models are loaded for this config. Where the device's loop may decode: with a spare slot, and spare
    positions in each slot.

    Raises InvalidConfig where a request may have more draft tokens than the device can verify.
    """
    own, device = int(_is_wanted(config)), torch.device(config.device)
    if (own or device.type == "cuda") and config.max_speculative_tokens > MOST_DRAFTS:
        raise InvalidConfig(
            f"max_speculative_tokens: {config.max_speculative_tokens} is more than the {MOST_DRAFTS} "
            "draft tokens that are verified at a time on the device"
        )
    return Placement(
        getattr(torch, config.dtype),
        device,
        config.max_batch + own,
        config.max_length,
        lean=config.model_path == "auto",
        spare=MOST_DRAFTS * own,
        launcher=backend_of(device).launcher if own else None,
    )


def open_decoder(
    config: EngineConfig, target: TokenModel, eos_token_ids: Collection[int], drafter: Drafter | None
) -> tuple[StepDecoder, str | None]:
    """The decoder, and why it is the host's where the device's was meant, or slower than it could be.

    Raises InvalidConfig where the device's loop was asked for and is not possible, InvalidModel where memory
    runs out.
    """
    device = torch.device(config.device)
    if not _is_wanted(config):
        return HostDecoder(target, device), None
    obstacle = _obstacle(target, drafter, device)
    if obstacle is not None or not isinstance(target, LlamaModel):
        if config.loop == "device":
            raise InvalidConfig(f"loop: 'device' is not possible: {obstacle}")
        logger.error("the host's loop decodes instead of the device's, which is slower: %s", obstacle)
        return HostDecoder(target, device), obstacle
    decoder = DeviceDecoder(
        target,
        eos_token_ids,
        config.max_batch,
        config.max_speculative_tokens,
        device,
        backend_of(device).launcher,
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
    return decoder, slow_layers(target, drafter) if device.type == "cuda" else None


def slow_layers(target: LlamaModel, drafter: Drafter | None) -> str | None:
    """Why torch computes layers that the kernels are meant for; also logged. None: the kernels do."""
    models = {"target": target}
    if isinstance(drafter, DraftModelDrafter):
        models["draft"] = llama_of(drafter)
    obstacles = [f"{name}: {each.kernels_obstacle}" for name, each in models.items() if each.kernels_obstacle]
    for obstacle in obstacles:
        logger.error("torch instead of the kernels computes the layers of the %s", obstacle)
    return "; ".join(obstacles) or None


def _is_wanted(config: EngineConfig) -> bool:
    return config.loop == "device" or (config.loop == "auto" and config.device == "cuda")


def _obstacle(target: TokenModel, drafter: Drafter | None, device: torch.device) -> str | None:
    if not isinstance(target, LlamaModel):
        return f"the target runs on the {target.path} path"
    try:
        check_drafter(drafter)
    except InvalidModel as error:
        return error.detail
    return backend_of(device).fallback
