"""Capturing CUDA graphs so that a failed capture does not harm later ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: _POOL_HANDLE) -> Iterator[None]:
    """Captures what is queued inside into the graph; other threads go on. Waits for the device.

    Where the end of a capture fails, torch (2.13) leaves this thread on the capture's stream and its
    allocator in the middle of the capture. Whatever empties the allocator's cache would then fail, each
    further capture too. Here both are restored; the pool must not be used again.
    """
    before = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    except BaseException:
        torch.cuda.set_stream(before)
        _stop_allocating(pool)
        raise


def first_cause(error: BaseException) -> BaseException:
    """The error that broke a capture. The one that ends the capture only follows from it."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _stop_allocating(pool: _POOL_HANDLE) -> None:
    index = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(index, pool)
    except RuntimeError:  # the capture had not begun, or had ended: then the graph frees the pool
        return
    torch._C._cuda_releasePool(index, pool)
