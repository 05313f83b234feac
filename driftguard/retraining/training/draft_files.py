"""The tensors and the configuration of a draft's directory, read without torch.

The format of .safetensors: eight bytes with the length of the header, the header (a JSON object: for each
tensor its type, shape, and where its bytes are), then the bytes of all tensors
(https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from driftguard.errors import DriftGuardError
from driftguard.records import UNREADABLE_JSON

_LENGTH_BYTES: Final = 8
_LANGUAGE_MODELS: Final = ("text_config", "decoder", "generator")  # in a configuration, as transformers looks
_ANY: Final = frozenset({"transformers_version", "torch_dtype", "dtype"})  # which may differ


class DraftRefused(DriftGuardError):
    """This draft cannot be loaded; the message names the reason."""

    status = 409
    title = "Draft refused"


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where the bytes of one tensor are. `dtype`: as safetensors names it, for example BF16."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    size: int

    def read(self) -> bytes:
        """In row-major order. Raises DraftRefused."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                found = file.read(self.size)
        except OSError as error:
            raise _unreadable(self.path, error.strerror) from None
        if len(found) != self.size:
            raise _unreadable(self.path, "it is cut off")
        return found


@dataclass(frozen=True, slots=True)
class Form:
    """What two drafts must have in common, so that one can be loaded in place of the other."""

    configuration: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    def check(self, other: Form) -> None:
        """Raises DraftRefused, which names the first difference of the other one."""
        _compare("tensors", self.shapes, other.shapes)
        _compare("config.json", self.configuration, other.configuration)


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[_Count]
    data_offsets: tuple[_Count, _Count]


def form_of(directory: Path) -> Form:
    """Raises DraftRefused: its files cannot be read."""
    shapes = {name: tensor.shape for name, tensor in tensors_of(directory).items()}
    return Form(_configuration_of(directory), shapes)


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """By name, in the order of the files. Raises DraftRefused."""
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise DraftRefused(f"there is no .safetensors file in {directory}")
    found: dict[str, Tensor] = {}
    for path in paths:
        here = {tensor.name: tensor for tensor in _tensors_in(path)}
        if twice := here.keys() & found.keys():
            raise DraftRefused(f"{path.name} has the tensor {min(twice)}, which another file has too")
        found |= here
    return found


def _tensors_in(path: Path) -> list[Tensor]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = file.read(min(length, size))
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        told = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in entries.items()}
    except OSError as error:
        raise _unreadable(path, error.strerror) from None
    except UNREADABLE_JSON as error:
        raise _unreadable(path, str(error)) from None
    first = _LENGTH_BYTES + length
    if size != first + max((entry.data_offsets[1] for entry in told.values()), default=0):
        raise _unreadable(path, "it has more or fewer bytes than its header says")
    return [
        Tensor(name, entry.dtype, tuple(entry.shape), path, first + start, end - start)
        for name, entry in told.items()
        for start, end in [entry.data_offsets]
    ]


def _configuration_of(directory: Path) -> Mapping[str, Any]:
    """What of config.json tells how the tensors are used."""
    try:
        found = msgspec.json.decode((directory / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, ValueError) as error:
        raise DraftRefused(f"config.json of the draft cannot be read: {error}") from None
    return {name: value for name, value in found.items() if name not in _ANY and not name.startswith("_")}


def context_of(*directories: str | None) -> int | None:
    """The shortest context of these models, in tokens; None where no config.json tells one, as that of a head
    does not."""
    told = [
        _configured(Path(directory), "max_position_embeddings")
        for directory in directories
        if directory is not None
    ]
    return min((context for context in told if context is not None), default=None)


def vocabulary_of(directory: str | None) -> int | None:
    """How many tokens this target has; None where its config.json does not tell."""
    return None if directory is None else _configured(Path(directory), "vocab_size")


def _configured(directory: Path, name: str) -> int | None:
    try:
        told = _configuration_of(directory)
    except DraftRefused:  # the training names what cannot be read
        return None
    inner: Mapping[str, Any] = next(
        (told[part] for part in _LANGUAGE_MODELS if isinstance(told.get(part), dict)), {}
    )
    found = inner.get(name, told.get(name))
    return found if isinstance(found, int) else None


def is_here(directory: Path) -> bool:
    """Whether it is a directory on this machine. False also where this user may not look: that of a server in
    a container may lie below /root."""
    try:
        return directory.is_dir()
    except OSError:
        return False


def _compare(what: str, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for name in sorted(wanted.keys() | found.keys()):
        if (old := wanted.get(name)) != (new := found.get(name)):
            raise DraftRefused(
                f"the {what} of the draft differ from those of the draft that the server was started with: "
                f"{name} is {new}, not {old}"
            )


def _unreadable(path: Path, reason: object) -> DraftRefused:
    return DraftRefused(f"{path.name} of the draft cannot be read: {reason}")
