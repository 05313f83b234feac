"""The self-test of the layer's kernels before they decode: every function once, against torch."""

from __future__ import annotations

import torch
from torch import Tensor

from driftguard_engine.kernels import layer_launches, layers
from driftguard_engine.kernels import linear as linear_kernels
from driftguard_engine.kernels.cuda.compiler import KernelsUnavailable
from driftguard_engine.kernels.cuda.launcher import Launcher, LaunchFailed
from driftguard_engine.kernels.layer_launches import AttentionScratch
from driftguard_engine.kernels.layers import KeysValues, Norm, Rows

_TOKENS, _LENGTH, _SEED = 3, 300, 21
_STARTS = [254, 0]  # tokens on both sides of the end of a split; the beginning of a sequence
_OUT, _IN = 40, 1160  # of a linear layer


def failure(launcher: Launcher, dtype: torch.dtype, group: int, dim: int, device: torch.device) -> str | None:
    """The error of `check` or of a launch in it; None: it passes."""
    try:
        check(launcher, dtype, group, dim, device)
    except (KernelsUnavailable, LaunchFailed) as problem:
        return str(problem)
    return None


def check(launcher: Launcher, dtype: torch.dtype, group: int, dim: int, device: torch.device) -> None:
    """Checks the kernels for a model of this dtype, with heads of `dim` and `group` query heads per key head.

    Raises KernelsUnavailable: which function differs from torch's, and by how much; ValueError: the kernels
    do not take such heads.
    """
    random = torch.Generator().manual_seed(_SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    count = len(_STARTS) * _TOKENS
    qkv, cos, sin = normal(count, (group + 2) * dim), normal(_LENGTH, dim), normal(_LENGTH, dim)
    rows = Rows(torch.tensor([1, 0]), torch.tensor(_STARTS), cos, sin)
    cache = KeysValues(
        normal(len(_STARTS) * _LENGTH, 1, dim), normal(len(_STARTS) * _LENGTH, 1, dim), _LENGTH
    )
    norm = Norm(normal(dim), 1e-5)
    x, added = normal(count, dim), normal(count, dim)

    def there(tensor: Tensor) -> Tensor:
        return tensor.to(device, copy=True)

    def room(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    their_rows = Rows(there(rows.slots), there(rows.starts), there(cos), there(sin))
    theirs = KeysValues(there(cache.keys), there(cache.values), _LENGTH)
    queries, mixed = room(len(_STARTS), _TOKENS, group, dim), room(count, group * dim)
    total, normed, gated = room(count, dim), room(count, dim), room(count, dim // 2)
    scratch = AttentionScratch.empty(count, group, dim, _LENGTH, device)
    layer_launches.rope_and_store_kv(launcher, there(qkv), group, None, their_rows, theirs, queries)
    layer_launches.attend(launcher, queries, their_rows, theirs, scratch, mixed)
    their_norm = Norm(there(norm.weight), norm.epsilon)
    layer_launches.add_and_norm(launcher, there(x), there(added), their_norm, total, normed)
    layer_launches.gate(launcher, total, gated)

    known_queries = layers.rope_and_store_kv(qkv, group, None, rows, cache)
    known_total, known_normed = layers.add_and_norm(x, added, norm)
    exact = KeysValues(cache.keys.double(), cache.values.double(), _LENGTH)
    _expect("rotated queries", queries, known_queries)
    _expect("stored keys", theirs.keys, cache.keys)
    _expect("stored values", theirs.values, cache.values)
    _expect("attention", mixed, layers.attend(known_queries.double(), rows, exact))
    _expect("sum", total, known_total)
    _expect("norm", normed, known_normed)
    _expect("gate", gated, layers.gate(known_total))
    if dtype in linear_kernels.DTYPES:
        _check_linear(launcher, dtype, device)


def _check_linear(launcher: Launcher, dtype: torch.dtype, device: torch.device) -> None:
    """Sizes that do not fill a tile (features, K, number of tokens); the kernel of every number of tokens."""
    random = torch.Generator().manual_seed(_SEED)
    weight, bias = (torch.randn(*of, generator=random).to(dtype) for of in ((_OUT, _IN), (_OUT,)))
    theirs = (weight.to(device), bias.to(device))
    for tokens in (1, 16, 27):
        x = torch.randn(tokens, _IN, generator=random).to(dtype)
        y, gated = (torch.empty(tokens, size, dtype=dtype, device=device) for size in (_OUT, _OUT // 2))
        linear_kernels.linear(launcher, x.to(device), *theirs, y)
        linear_kernels.linear_gated(launcher, x.to(device), *theirs, gated)
        exact = (x.double(), weight.double(), bias.double())
        _expect("linear layer", y, layers.linear(*exact))
        _expect("gated linear layer", gated, layers.linear_gated(*exact))


def _expect(what: str, found: Tensor, known: Tensor) -> None:
    off = (found.cpu().double() - known.double()).abs()
    allowed = 4 * torch.finfo(found.dtype).eps * (1 + known.double().abs())
    if not bool((off <= allowed).all()):
        raise KernelsUnavailable(
            f"the kernels fail their self-test: {what} in {found.dtype} is off by {off.max().item():.3g}"
        )
