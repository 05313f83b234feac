"""Powers of two: as numpy computes them fastest, and as the CUDA kernels do, bit for bit, on any machine.

The reference uses numpy's by default, which differ from the kernels' by less than 2**-17 of their value. To
compare a kernel with the reference, token by token, give the reference `fused_exp2`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Singles = NDArray[np.float32]

LEAST_POWER = np.float32(-125)  # smaller ones are raised, so that no weight is subnormal

# 2**f for |f| <= 1/2, relative error below 2**-18: a ten-thousandth of what rounding a logit near 10 to
# bfloat16 changes. The leading 1 makes the likeliest token weigh exactly 1.
COEFFICIENTS = tuple(
    np.float32(float.fromhex(digits))
    for digits in ("0x1.3a0514p-7", "0x1.c9fc68p-5", "0x1.ec036ep-3", "0x1.62e12cp-1", "0x1p0")
)  # the highest power first
_ROUNDER = np.float32(1.5 * 2**23)  # adding it leaves the nearest integer in the low bits
_LN_2 = np.float32(np.log(2))


def numpy_exp2(difference: Singles, scale: Singles) -> Singles:
    """2 ** (difference x scale), broadcast, of differences up to 0, which it overwrites, and scales above 0.

    By exp, which numpy computes in vectors.
    """
    difference *= scale
    if not difference.min(initial=0) >= LEAST_POWER:  # this check takes a fraction of the time of np.maximum
        np.maximum(difference, LEAST_POWER, out=difference)
    difference *= _LN_2
    return np.exp(difference, out=difference)


def fused_exp2(difference: Singles, scale: Singles) -> Singles:
    """The same in few instructions: the nearest integer, six fused multiply-adds, the exponent."""
    least = np.ldexp(
        LEAST_POWER, -np.frexp(scale)[1]
    )  # scaled, from -125 to -62.5: the kernels do not divide
    difference = np.maximum(difference, least)
    shifted = _fused(difference, scale, _ROUNDER)
    fraction = _fused(difference, scale, _ROUNDER - shifted)
    result = np.full_like(fraction, COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        result = _fused(result, fraction, coefficient)
    return (result.view(np.int32) + (shifted.view(np.int32) << 23)).view(np.float32)


def _fused(a: Singles, b: Singles, c: Singles | np.float32) -> Singles:
    """a b + c, rounded once.

    The product is exact in float64. Its sum with c is rounded to odd there, so that rounding once more, to
    float32, gives what one rounding would have given (Boldo and Melquiond, "Emulation of FMA and correctly
    rounded sums", IEEE Transactions on Computers 57(4), 2008).
    """
    product, addend = a.astype(np.float64) * b, np.asarray(c, np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    inexact = (error != 0) & (total.view(np.int64) & 1 == 0)
    outward = np.where((error > 0) == (total > 0), 1, -1)
    odd = (total.view(np.int64) + np.where(inexact, outward, 0)).view(np.float64)
    return odd.astype(np.float32)
