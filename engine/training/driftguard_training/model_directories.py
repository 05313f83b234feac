"""Loading and saving plain transformers directories; safetensors only, never pickle."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from driftguard_engine.models.loading import context_of
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from driftguard_training.errors import BadModelDirectory, ModelsDoNotFit, OutputExists

PROVENANCE_FILE = "driftguard_training.json"
CHECKSUMS_FILE = (
    "SHA256SUMS"  # in the format of sha256sum; engine and sidecar verify it before the draft serves
)
_PICKLED_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal LM in float32 with its tokenizer; `dtype` is what the directory stores."""

    directory: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def context_tokens(self) -> int:
        """Without a limit where the model has none."""
        return context_of(self.model.config) or sys.maxsize


def load_model(directory: Path, role: str) -> LoadedModel:
    """Load for CPU work in float32. `role` (target or draft) is for the error message.

    Raises:
        BadModelDirectory: missing, incomplete, unreadable, or with pickled weights only.
    """
    check_model_directory(directory, role)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype="auto", use_safetensors=True, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise BadModelDirectory(f"{role} directory {directory}: cannot be loaded: {error}") from error
    stored = model.dtype
    return LoadedModel(directory, model.float().eval(), tokenizer, stored)


def check_model_directory(directory: Path, role: str) -> None:
    """Raise BadModelDirectory unless `directory` looks like a transformers directory with safetensors.
    Pickles beside these are not read."""
    problem = None
    if not directory.is_dir():
        problem = "no such directory"
    elif not (directory / "config.json").is_file():
        problem = "has no config.json; a transformers model directory is needed"
    elif not list(directory.glob("*.safetensors")):
        problem = "has no *.safetensors file"
        if pickled := sorted(p.name for p in directory.iterdir() if p.suffix in _PICKLED_SUFFIXES):
            problem = f"holds pickled weights ({pickled[0]}), which can run code; only safetensors are read"
    if problem:
        raise BadModelDirectory(f"{role} directory {directory}: {problem}")


def check_fit(target: LoadedModel, draft: LoadedModel) -> None:
    """Raise ModelsDoNotFit unless both read and write the same token ids. Behind those of the tokenizer they
    may have other numbers of rows that stand for none."""
    if target.tokenizer.get_vocab() != draft.tokenizer.get_vocab():
        raise ModelsDoNotFit(
            f"The draft in {draft.directory} does not fit the target in {target.directory}: their "
            "tokenizers differ; both need the same token ids"
        )


def check_output(output: Path) -> None:
    """Raise OutputExists before any time is spent on training."""
    if output.exists():
        raise OutputExists(f"--output {output} already exists; name a new directory")


def save_model(
    output: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    provenance: Mapping[str, object],
) -> str:
    """Write the directory atomically; returns its version (weights' hash, 12 hex digits)."""

    def write(directory: Path) -> None:
        cast("Any", model).to(dtype).save_pretrained(directory)
        tokenizer.save_pretrained(directory)

    return save_files(output, write, provenance)


def save_files(
    output: Path,
    write: Callable[[Path], None],
    provenance: Mapping[str, object],
    *,
    others_may_read: bool = True,
) -> str:
    """Let `write` fill a new directory, add what tells how it was made, and put it in place at once.

    The files are written to a directory beside `output`, which is then renamed, so a reader never sees half a
    model. The next run removes what a killed run left. Returns the version.
    """
    check_output(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial_prefix = f".{output.name}.partial-"
    for leftover in output.parent.glob(f"{partial_prefix}*"):
        shutil.rmtree(leftover)
    partial = Path(tempfile.mkdtemp(prefix=partial_prefix, dir=output.parent))
    write(partial)
    version = _weights_hash(partial)
    facts = {"version": version, **provenance}
    (partial / PROVENANCE_FILE).write_text(json.dumps(facts, indent=2) + "\n")
    _write_checksums(partial)
    _make_readable(partial, others=others_may_read)
    partial.replace(output)
    return version


def _write_checksums(directory: Path) -> None:
    """Write SHA256SUMS of all other files; last."""
    lines = []
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    (directory / CHECKSUMS_FILE).write_text("".join(lines))


def _make_readable(directory: Path, *, others: bool) -> None:
    """Temporary directories and safetensors files are readable by their owner only, but the engine may run as
    another user, for what `others` may not read of the same group.
    """
    directory.chmod(0o755 if others else 0o750)
    for path in directory.iterdir():
        path.chmod(0o644 if others else 0o640)


def model_version(directory: Path) -> str:
    """The version that the engine reports for this directory: as recorded, else the weights' hash."""
    provenance = directory / PROVENANCE_FILE
    if provenance.is_file():
        return str(json.loads(provenance.read_text())["version"])
    return _weights_hash(directory)


def _weights_hash(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):  # several when sharded
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()[:12]
