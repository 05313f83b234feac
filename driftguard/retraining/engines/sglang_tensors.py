"""Tensors as SGLang's /update_weights_from_tensor takes them, made without torch.

A body has one pickle for each rank of tensor parallelism, in base64: a list of (name, tensor). SGLang 0.5.23
reads it with a restricted unpickler (SafeUnpickler of sglang.srt.utils.common), which lets a tensor be
made of the bytes of a storage as torch.save writes it. torch would send handles of shared memory; the bytes
themselves need no common machine.
"""

from __future__ import annotations

import base64
import json
import math
import pickle
import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final

from driftguard.retraining.training.draft_files import DraftRefused, Tensor

BODY_BYTES: Final = 64 << 20  # of tensors in one body, all ranks together; one tensor is never divided

_LARGEST: Final = (1 << 32) - (1 << 16)  # a pickle's bytes have a length of 32 bits; some are torch.save's
_STORAGES: Final = {  # of torch, by safetensors' name of the type; with the bytes of one number
    "BF16": ("BFloat16Storage", 2),
    "F16": ("HalfStorage", 2),
    "F32": ("FloatStorage", 4),
}
# The beginning of what torch.save writes (_legacy_save of torch.serialization).
_HEAD: Final = b"".join(
    pickle.dumps(value, 2)
    for value in (
        0x1950A86A20F9469CFC6C,
        1001,
        {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}},
    )
)


def check(tensors: Iterable[Tensor]) -> None:
    """Raises DraftRefused: SGLang could not make this tensor, and its scheduler would end."""
    for tensor in tensors:
        if tensor.dtype not in _STORAGES:
            raise DraftRefused(
                f"the tensor {tensor.name} is {tensor.dtype}, not one of {', '.join(_STORAGES)}"
            )
        if math.prod(tensor.shape) * _STORAGES[tensor.dtype][1] != tensor.size:
            raise DraftRefused(f"the tensor {tensor.name} has {tensor.size} bytes, not those of its shape")
        if tensor.size > _LARGEST:
            raise DraftRefused(f"the tensor {tensor.name} has {tensor.size} bytes, more than {_LARGEST}")


def parts_of(tensors: Iterable[Tensor], ranks: int) -> list[list[Tensor]]:
    """In order, divided so that a body of each part has about BODY_BYTES."""
    parts: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not parts or tensor.size * ranks > room:
            parts.append([])
            room = BODY_BYTES
        parts[-1].append(tensor)
        room -= tensor.size * ranks
    return parts


def body(tensors: Iterable[Tensor], ranks: int, members: Mapping[str, Any]) -> bytes:
    """The JSON body, with these other members. Raises DraftRefused: a file cannot be read."""
    one = b'"' + base64.b64encode(pickled((tensor, tensor.read()) for tensor in tensors)) + b'"'
    others = json.dumps(dict(members)).encode()
    return b'{"serialized_named_tensors":[' + b",".join([one] * ranks) + b"]," + others[1:]


def pickled(tensors: Iterable[tuple[Tensor, bytes]]) -> bytes:
    """A list of (name, tensor), for tensors that `check` lets pass."""
    pairs = (_value(tensor.name) + _tensor(tensor, content) + pickle.TUPLE2 for tensor, content in tensors)
    return b"\x80\x03" + pickle.EMPTY_LIST + pickle.MARK + b"".join(pairs) + pickle.APPENDS + pickle.STOP


def _tensor(tensor: Tensor, content: bytes) -> bytes:
    storage = _call("torch.storage", "_load_from_bytes", _value(_saved(tensor, content)))
    hooks = _call("collections", "OrderedDict")
    stride = tuple(math.prod(tensor.shape[place + 1 :]) for place in range(len(tensor.shape)))
    rest = [
        _value(value) for value in (0, tensor.shape, stride, False)
    ]  # offset, shape, stride, has gradient
    return _call("torch._utils", "_rebuild_tensor_v2", storage, *rest, hooks)


def _saved(tensor: Tensor, content: bytes) -> bytes:
    """A storage as torch.save writes it."""
    kind, size = _STORAGES[tensor.dtype]
    count = len(content) // size
    # type, key, place, count, view
    told = [_value("storage"), _global("torch", kind), *map(_value, ("0", "cpu", count)), _value(None)]
    named = b"\x80\x02" + pickle.MARK + b"".join(told) + pickle.TUPLE + pickle.BINPERSID + pickle.STOP
    return _HEAD + named + pickle.dumps(["0"], 2) + struct.pack("<q", count) + content


def _call(module: str, name: str, *arguments: bytes) -> bytes:
    called = pickle.MARK + b"".join(arguments) + pickle.TUPLE + pickle.REDUCE
    return _global(module, name) + called


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _value(value: object) -> bytes:
    """Pickled, without the version at the beginning and the stop at the end."""
    return pickle.dumps(value, 3)[2:-1]
