"""A backend of vLLM's weight transfer that loads a draft from a directory, in each worker of a running vLLM.

A session is begun by /start_draft_weight_update. /update_weights names the directory: all that can be found
wrong with it is found then, while the draft that serves is untouched. /finish_weight_update loads it; where
no directory is held, it only ends the session.

Imported by vLLM's workers alone, which have vLLM and torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from driftguard.retraining.training import checksums

_ANY: Final = frozenset({"transformers_version", "torch_dtype", "dtype"})  # which may differ

Shapes = Mapping[str, tuple[int, ...]]


class DraftRefused(Exception):
    """This directory is not loaded, or none can be; the message names the reason."""


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """`driftguard`: that the caller means this backend; others refuse the unknown name."""

    driftguard: bool


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`directory`: None lets go of the one held. `checksums_sha256`: the digest of its SHA256SUMS."""

    directory: str | None = None
    checksums_sha256: str | None = None


class DraftLoader(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Loads only what has the tensors and the configuration of the draft that vLLM was started with."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._held: Path | None = None
        self._configuration: Mapping[str, Any] = {}
        self._shapes: Shapes = {}
        self._refusal = ""
        try:
            first = _first_draft(vllm_config.speculative_config)
            self._configuration, self._shapes = _configuration_of(first), _shapes_of(first)
        except DraftRefused as error:
            self._refusal = str(error)  # vLLM starts all the same

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Raises DraftRefused: no draft can be loaded into this vLLM."""
        del init_info
        if self._refusal:
            raise DraftRefused(self._refusal)

    def start_weight_update(self) -> None:
        """Raises DraftRefused: the session is the target's."""
        self._held = None
        if self.model is self._default_model:
            raise DraftRefused("this backend loads drafts; begin with /start_draft_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Unlike vLLM's, it does not wait for the device, which nothing was sent to."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Looks at the directory and holds it. Raises DraftRefused, DraftChanged."""
        self._held = None
        if update_info.directory is None:
            return
        directory = Path(update_info.directory)
        if update_info.checksums_sha256 is not None or (directory / checksums.FILE_NAME).exists():
            checksums.verify(directory, update_info.checksums_sha256)
        _compare("tensors", self._shapes, _shapes_of(directory))
        _compare("config.json", self._configuration, _configuration_of(directory))
        self._held = directory

    def finish_weight_update(self) -> None:
        """Loads what is held. Where that fails, a mix of both drafts serves: the caller loads one again."""
        directory, self._held = self._held, None
        if directory is None:
            return
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(_tensors_of(directory))
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        _prepare_tied_head(self.model)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        self._held = None


def _first_draft(speculative: Any) -> Path:
    if speculative is None or speculative.method != "draft_model":
        method = None if speculative is None else speculative.method
        raise DraftRefused(f"vLLM speculates with method {method}; only draft_model can be loaded live")
    directory = Path(speculative.draft_model_config.model)
    if not directory.is_dir():
        raise DraftRefused(f"vLLM was started with the draft {directory}, which is no directory")
    return directory


def _configuration_of(directory: Path) -> Mapping[str, Any]:
    """What of config.json tells how the tensors are used."""
    try:
        found = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DraftRefused(f"config.json of the draft cannot be read: {error}") from None
    return {name: value for name, value in found.items() if name not in _ANY and name[0] != "_"}


def _shapes_of(directory: Path) -> Shapes:
    """Of every tensor, by its name."""
    found: dict[str, tuple[int, ...]] = {}
    for path in _files_of(directory):
        try:
            with safe_open(path, "pt") as file:
                here = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise DraftRefused(f"{path.name} of the draft cannot be read: {error}") from None
        if twice := here.keys() & found.keys():
            raise DraftRefused(f"{path.name} has the tensor {min(twice)}, which another file has too")
        found |= here
    return found


def _tensors_of(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in _files_of(directory):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (a file is no mapping)
                yield name, file.get_tensor(name)


def _files_of(directory: Path) -> list[Path]:
    if files := sorted(directory.glob("*.safetensors")):
        return files
    raise DraftRefused(f"there is no .safetensors file in {directory}")


def _compare(what: str, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Names the first difference."""
    for name in sorted(wanted.keys() | found.keys()):
        if (old := wanted.get(name)) != (new := found.get(name)):
            raise DraftRefused(
                f"the {what} of the draft differ from those of the draft that vLLM was started with: "
                f"{name} is {new}, not {old}"
            )


def _prepare_tied_head(model: Any) -> None:
    """A head that shares the embedding's weights is not loaded by itself, but on a CPU it has a packed copy
    of them (a limitation that vLLM's reload names)."""
    head = getattr(model, "lm_head", None)
    if head is not None and getattr(model.config, "tie_word_embeddings", False):
        head.quant_method.process_weights_after_loading(head)
