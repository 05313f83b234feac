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
_STARTS = [254, 0, 40]  # tokens on both sides of the end of a split; the beginning of a sequence
# Standard deviation of each sequence's queries: the weights of 257 positions are nearly even, so that each
# position shows in the result; those of few positions are not, so that their scale does.
_QUERY_SIZES = [1 / 16, 1.0, 0.5]
_OUT, _IN = 40, 1160  # of a linear layer
_TIMES_TORCH = 4


def failure(launcher: Launcher, dtype: torch.dtype, group: int, dim: int, device: torch.device) -> str | None:
    """The error of `check` or of a launch in it; None: it passes."""
    try:
        check(launcher, dtype, group, dim, device)
    except (KernelsUnavailable, LaunchFailed) as problem:
        return str(problem)
    return None


def check(launcher: Launcher, dtype: torch.dtype, group: int, dim: int, device: torch.device) -> None:
    """Checks the kernels for a model of this dtype, with heads of `dim` and `group` query heads per key head.

    The kernels and torch get the same inputs, and may err alike: see `_expect`. Raises KernelsUnavailable:
    which function is wrong, and by how much; ValueError: the kernels do not take such heads.
    """
    random = torch.Generator().manual_seed(_SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    def there(tensor: Tensor) -> Tensor:
        return tensor.to(device, copy=True)

    def room(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    sequences, count = len(_STARTS), len(_STARTS) * _TOKENS
    qkv, cos, sin = normal(sequences, _TOKENS, group + 2, dim), normal(_LENGTH, dim), normal(_LENGTH, dim)
    qkv[:, :, :group] *= torch.tensor(_QUERY_SIZES, dtype=dtype)[:, None, None, None]
    qkv = qkv.view(count, (group + 2) * dim)
    rows = Rows(torch.arange(sequences).flip(0), torch.tensor(_STARTS), cos, sin)
    their_rows = Rows(*(there(each) for each in (rows.slots, rows.starts, cos, sin)))
    exact_rows = Rows(rows.slots, rows.starts, cos.double(), sin.double())
    places = sequences * _LENGTH
    cache = KeysValues(normal(places, 1, dim), normal(places, 1, dim), _LENGTH)
    theirs = KeysValues(there(cache.keys), there(cache.values), _LENGTH)
    exact_cache = _double(cache)

    queries = room(sequences, _TOKENS, group, dim)
    layer_launches.rope_and_store_kv(launcher, there(qkv), group, None, their_rows, theirs, queries)
    known_queries = layers.rope_and_store_kv(qkv, group, None, rows, cache)
    exact_queries = layers.rope_and_store_kv(qkv.double(), group, None, exact_rows, exact_cache)
    _expect("rotated queries", queries, known_queries, exact_queries)
    _expect("stored keys", theirs.keys, cache.keys, exact_cache.keys)
    _expect("stored values", theirs.values, cache.values, exact_cache.values)

    mixed = room(count, group * dim)
    scratch = AttentionScratch.empty(count, group, dim, _LENGTH, device)
    theirs = KeysValues(there(cache.keys), there(cache.values), _LENGTH)
    layer_launches.attend(launcher, there(known_queries), their_rows, theirs, scratch, mixed)
    known, exact = (
        layers.attend(*given)
        for given in ((known_queries, rows, cache), (known_queries.double(), rows, _double(cache)))
    )
    _expect("attention", *(each.view(count, group, dim) for each in (mixed, known, exact)))

    norm, x, added = Norm(normal(dim), 1e-5), normal(count, dim), normal(count, dim)
    total, normed, gated = room(count, dim), room(count, dim), room(count, dim // 2)
    their_norm = Norm(there(norm.weight), norm.epsilon)
    layer_launches.add_and_norm(launcher, there(x), there(added), their_norm, total, normed)
    known_total, known_normed = layers.add_and_norm(x, added, norm)
    _expect("sum", total, known_total, x.double() + added.double())
    exact_norm = Norm(norm.weight.double(), norm.epsilon)
    _expect("norm", normed, known_normed, exact_norm.apply(known_total.double()))
    layer_launches.gate(launcher, there(known_total), gated)
    _expect("gate", gated, layers.gate(known_total), layers.gate(known_total.double()))
    if dtype in linear_kernels.DTYPES:
        _check_linear(launcher, dtype, device)


def _double(cache: KeysValues) -> KeysValues:
    return KeysValues(cache.keys.double(), cache.values.double(), cache.length)


def _check_linear(launcher: Launcher, dtype: torch.dtype, device: torch.device) -> None:
    """Sizes that do not fill a tile (features, K, number of tokens); the kernel of every number of tokens."""
    random = torch.Generator().manual_seed(_SEED)
    weight = (torch.randn(_OUT, _IN, generator=random) / _IN**0.5).to(dtype)
    bias = torch.randn(_OUT, generator=random).to(dtype)
    theirs = (weight.to(device), bias.to(device))
    for tokens in (1, 16, 27):
        x = torch.randn(tokens, _IN, generator=random).to(dtype)
        y, gated = (torch.empty(tokens, size, dtype=dtype, device=device) for size in (_OUT, _OUT // 2))
        linear_kernels.linear(launcher, x.to(device), *theirs, y)
        linear_kernels.linear_gated(launcher, x.to(device), *theirs, gated)
        given, exact = (x, weight, bias), (x.double(), weight.double(), bias.double())
        _expect("linear layer", y, layers.linear(*given), layers.linear(*exact))
        _expect("gated linear layer", gated, layers.linear_gated(*given), layers.linear_gated(*exact))


def _expect(what: str, found: Tensor, known: Tensor, exact: Tensor) -> None:
    """found, of the kernels, may be off from exact by `_TIMES_TORCH` times what known is, torch's own result
    in the same dtype, and by one rounding more; all in parts of the largest number of its row (the last
    dimension)."""
    largest = exact.abs().amax(-1, keepdim=True)
    off, torchs = (float(((each.cpu().double() - exact).abs() / largest).max()) for each in (found, known))
    if not off <= _TIMES_TORCH * torchs + torch.finfo(found.dtype).eps / 2:
        raise KernelsUnavailable(
            f"the kernels fail their self-test: {what} in {found.dtype} is off by {off:.3g} of the largest "
            f"number of its row, torch's by {torchs:.3g}"
        )
