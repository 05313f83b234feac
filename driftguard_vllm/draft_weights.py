"""A backend of vLLM's weight transfer that loads a draft from a directory, in each worker of a running vLLM.

A session is begun by /start_draft_weight_update. /update_weights names the directory: all that can be found
wrong with it is found then, while the draft that serves is untouched. /finish_weight_update loads it; where
no directory is held, it only ends the session.

Imported by vLLM's workers alone, which have vLLM and torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from driftguard.retraining.training import checksums
from driftguard.retraining.training.draft_files import DraftRefused, Form, form_of


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
        self._form: Form | None = None  # of the draft that vLLM was started with
        self._refusal = ""
        try:
            self._form = form_of(_first_draft(vllm_config.speculative_config))
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
        checksums.verify_if_known(directory, update_info.checksums_sha256)
        if self._form is None:
            raise DraftRefused(self._refusal)
        self._form.check(form_of(directory))
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


def _tensors_of(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (a file is no mapping)
                yield name, file.get_tensor(name)


def _prepare_tied_head(model: Any) -> None:
    """A head that shares the embedding's weights is not loaded by itself, but on a CPU it has a packed copy
    of them (a limitation that vLLM's reload names)."""
    head = getattr(model, "lm_head", None)
    if head is not None and getattr(model.config, "tie_word_embeddings", False):
        head.quant_method.process_weights_after_loading(head)
