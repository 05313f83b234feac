"""Locates a model's files, and checks that they are safe to load: safetensors only, never pickle."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from driftguard_engine.core import InvalidModel
from driftguard_engine.models import checksums

PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
_VERSION_FILE = "driftguard_training.json"
_LONGEST_VERSION = 256  # of a record's field
_READ_BYTES = 1 << 20
_SHOWN_CHARACTERS = 200  # of a wrong name, in the error


def locate(name: str, *, field: str) -> Path:
    """The directory of a local path or of a hub name, checked. Raises InvalidModel."""
    directory = find(name, field=field)
    checksums.verify(directory, field=field)
    return directory


def find(name: str, *, field: str) -> Path:
    """As `locate`, without reading the files to verify them."""
    directory = _local(name, field) or _download(name, field)
    _check(directory, field)
    return directory


def shown_name(name: str, directory: Path) -> str:
    """The hub name, or the last component of a local directory."""
    return directory.name if Path(name).expanduser().is_dir() else name


def _local(name: str, field: str) -> Path | None:
    """The local directory of this name; None: it may be a hub name. Raises InvalidModel."""
    shown = ascii(name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}...")
    try:
        directory = Path(name).expanduser()
        if directory.is_dir():
            return directory.absolute()
        is_file = directory.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, ~ of an unknown user, a NUL
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidModel(f"{field}: {shown} is not a directory ({reason})", field=field) from None
    if is_file:
        raise InvalidModel(f"{field}: {shown} is a file; a transformers directory is needed", field=field)
    if directory.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise InvalidModel(f"{field}: there is no directory {shown}", field=field)
    return None


def _download(name: str, field: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise InvalidModel(
            f"{field}: {name!r} is not a directory here, nor loaded from the hub ({type(error).__name__})",
            field=field,
        ) from error


def _check(directory: Path, field: str) -> None:
    if not (directory / "config.json").is_file():
        raise InvalidModel(
            f"{field}: {directory} has no config.json; a transformers directory is needed", field=field
        )
    if weight_files(directory):
        return
    pickled = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLED)
    if pickled:
        raise InvalidModel(
            f"{field}: {directory} holds pickled weights only ({', '.join(pickled[:3])}), which can run code "
            "when they are loaded; save them with save_pretrained(..., safe_serialization=True)",
            field=field,
        )
    raise InvalidModel(f"{field}: {directory} has no *.safetensors", field=field)


def config_of(directory: Path) -> dict[str, Any]:
    """What config.json says. Raises OSError, ValueError."""
    found: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return found


def weight_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def loaded_files(directory: Path) -> list[Path]:
    """The weights that transformers loads: beside them there may be the same ones in another format."""
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [directory / name for name in sorted(set(shards))]


def version_of(directory: Path) -> str:
    """The version in driftguard_training.json, else 12 hex digits of the weights' SHA-256.

    Raises InvalidModel.
    """
    made_by = directory / _VERSION_FILE
    if made_by.is_file():
        try:
            version = json.loads(made_by.read_text(encoding="utf-8")).get("version")
        except (OSError, ValueError, AttributeError) as error:
            raise InvalidModel(f"{made_by} is not a JSON object ({error})", field="directory") from None
        if version is not None:
            return _recordable(str(version), made_by)
    digest = hashlib.sha256()
    for path in weight_files(directory):
        with path.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
    return digest.hexdigest()[:12]


def _recordable(version: str, source: Path) -> str:
    """Raises InvalidModel where no record may hold it."""
    is_text = version.encode("utf-8", "ignore").decode() == version  # no lone surrogates
    if not is_text or not 1 <= len(version) <= _LONGEST_VERSION or "\0" in version:
        raise InvalidModel(
            f"{source}: version {ascii(version)[:_SHOWN_CHARACTERS]} is not text of 1 to {_LONGEST_VERSION} "
            "characters without NUL",
            field="directory",
        )
    return version
