"""Checks that weights can serve: of the right names and shapes, finite in the dtype they serve in, plausibly
large, logits not all alike."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from driftguard_engine.core import InvalidModel

LARGEST_WEIGHT = 1e4  # in published models all weights are below a few hundred
FIXED_TOKENS = 4


def check_weights(module: Any, directory: Path, *, field: str) -> None:
    """module: on its device, in the dtype it serves in, which may overflow where that of the file does not.

    Raises InvalidModel: as `check_parameters`; the logits of fixed tokens are not finite; or all tokens get
    the same logit.
    """
    check_parameters(module, directory, field=field)
    logits = _logits(module)
    if not bool(torch.isfinite(logits).all()):
        raise _refused(f"the logits of fixed tokens are not finite in {logits.dtype}", directory, field)
    if bool((logits == logits[..., :1]).all()):
        raise _refused("every token gets the same logit", directory, field)


def check_parameters(module: Any, directory: Path, *, field: str) -> None:
    """Raises InvalidModel: a tensor is not finite, or a weight is implausibly large."""
    for name, tensor in module.named_parameters():
        least, most = (float(end) for end in torch.aminmax(tensor.detach()))
        if not (math.isfinite(least) and math.isfinite(most)):
            raise _refused(f"{name} is not finite in {tensor.dtype}", directory, field)
        if max(-least, most) > LARGEST_WEIGHT:
            extreme = max(least, most, key=abs)
            raise _refused(f"{name} holds {extreme:g}, beyond {LARGEST_WEIGHT:g}", directory, field)


def fill(
    module: nn.Module, tensors: Mapping[str, Tensor], target: str, whole: str, besides: Collection[str] = ()
) -> None:
    """Puts tensors of these names and shapes into the module, which is on "meta". Raises ValueError: as
    `check_names`."""
    wanted = {name: each.shape for name, each in module.state_dict().items()}
    check_names(tensors, wanted, target, whole, besides)
    # Copies: what safetensors reads are pages of the file, which others may write.
    module.load_state_dict({name: tensors[name].clone() for name in wanted}, assign=True)


def check_names(
    tensors: Mapping[str, Tensor],
    wanted: Mapping[str, torch.Size],
    target: str,
    whole: str,
    besides: Collection[str] = (),
) -> None:
    """besides: names that may be there too. Raises ValueError: a tensor is missing, has another shape than is
    needed for `target`, or is no part of `whole`."""
    for name, shape in wanted.items():
        if name not in tensors:
            raise ValueError(f"{name} is missing")
        if tensors[name].shape != shape:
            raise ValueError(f"{name} is {[*tensors[name].shape]}, needed is {[*shape]} for {target}")
    if unknown := sorted(tensors.keys() - wanted.keys() - {*besides}):
        raise ValueError(f"{unknown[0]} is no part of {whole}")


def _logits(module: Any) -> torch.Tensor:
    """[1, FIXED_TOKENS, V]"""
    embeddings = module.get_input_embeddings().weight
    token_ids = torch.linspace(0, len(embeddings) - 1, FIXED_TOKENS).long()[None].to(embeddings.device)
    with torch.inference_mode():
        logits: torch.Tensor = module(input_ids=token_ids, use_cache=False).logits
    return logits


def _refused(what: str, directory: Path, field: str) -> InvalidModel:
    return InvalidModel(f"{field}: the weights in {directory} cannot serve: {what}", field=field)
