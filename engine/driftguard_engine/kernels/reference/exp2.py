"""Powers of two: as numpy computes them fastest, and as the CUDA kernels do, bit for bit, on any machine.

The reference uses numpy's by default, which differs from the kernels' in the last bits. To compare a kernel
with the reference, token by token, give the reference `fused_exp2`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Singles = NDArray[np.float32]

# 2**f for |f| <= 1/2, relative error below 2**-23; the leading 1 makes the likeliest token weigh exactly 1.
COEFFICIENTS = tuple(
    np.float32(float.fromhex(digits))
    for digits in (
        *("0x1.5bba14p-10", "0x1.3cea88p-7", "0x1.c6b752p-5"),
        *("0x1.ebf9bcp-3", "0x1.62e42ap-1", "0x1p0"),
    )
)  # the highest power first
_ROUNDER = np.float32(1.5 * 2**23)  # adding it leaves the nearest integer in the low bits
_LN_2 = np.float32(np.log(2))


def numpy_exp2(power: Singles) -> Singles:
    """float32 -> 2**power, in place. By exp, which numpy computes in vectors."""
    power *= _LN_2
    return np.exp(power, out=power)


def fused_exp2(power: Singles) -> Singles:
    """float32 in [-125, 0] -> 2**power: the nearest integer, five fused multiply-adds, the exponent."""
    shifted = power + _ROUNDER
    fraction = power - (shifted - _ROUNDER)
    result = np.full_like(power, COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        result = _fused(result, fraction, coefficient)
    return (result.view(np.int32) + (shifted.view(np.int32) << 23)).view(np.float32)


def _fused(a: Singles, b: Singles, c: np.float32) -> Singles:
    """a b + c, rounded once.

    The product is exact in float64. Its sum with c is rounded to odd there, so that rounding once more, to
    float32, gives what one rounding would have given (Boldo and Melquiond, "Emulation of FMA and correctly
    rounded sums", IEEE Transactions on Computers 57(4), 2008).
    """
    product, addend = a.astype(np.float64) * b, np.float64(c)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    inexact = (error != 0) & (total.view(np.int64) & 1 == 0)
    outward = np.where((error > 0) == (total > 0), 1, -1)
    odd = (total.view(np.int64) + np.where(inexact, outward, 0)).view(np.float64)
    return odd.astype(np.float32)
