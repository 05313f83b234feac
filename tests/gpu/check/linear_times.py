"""Linear layers of a few tokens by the kernels that read each weight once, beside torch's library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from driftguard_engine.kernels import layer_launches
from driftguard_engine.kernels import linear as linear_kernels
from driftguard_engine.kernels.cuda import loader
from driftguard_engine.kernels.cuda.launcher import Launcher
from torch import Tensor
from torch.nn import functional as F

from tests.gpu.check.rows import LinearTime
from tests.gpu.check.run import Run
from tests.gpu.check.timing import bandwidth_of, cold_sets, graph_microseconds


@dataclass(frozen=True, slots=True)
class Layer:
    name: str
    size: int  # features, N
    inner: int  # K
    gated: bool = False

    @property
    def weights(self) -> int:
        return self.size * self.inner


# Of Llama-3-8B, and the head of Llama-2.
LAYERS = (
    Layer("output", 4096, 4096),
    Layer("queries, keys, values", 6144, 4096),
    Layer("gate and up", 2 * 14_336, 4096),
    Layer("gate and up, gated", 2 * 14_336, 4096, gated=True),
    Layer("down", 4096, 14_336),
    Layer("head of 32,000", 32_000, 4096),
    Layer("head of 128,256", 128_256, 4096),
)
TOKENS = (1, 5, 9)  # K + 1 for no drafts, 4 and 8


@dataclass(frozen=True, slots=True)
class Weights:
    """As many matrices as it takes to pass through the cache several times over."""

    layer: Layer
    each: list[Tensor]

    @classmethod
    def make(cls, layer: Layer, device: torch.device) -> Weights:
        each = [
            torch.empty(layer.size, layer.inner, dtype=torch.bfloat16, device=device).normal_()
            for _ in range(cold_sets(device, 2 * layer.weights))
        ]
        return cls(layer, each)


def floor_bytes(layer: Layer, tokens: int, element_bytes: int = 2) -> int:
    """Of weights, x and y."""
    written = layer.size // 2 if layer.gated else layer.size
    return (layer.weights + tokens * (layer.inner + written)) * element_bytes


def linear_layers(run: Run) -> None:
    kernels = loader.kernels(torch.device("cuda"))
    bandwidth = bandwidth_of(run, kernels.device)
    for layer in LAYERS:
        if run.late(f"linear layer {layer.name}"):
            continue
        weights = Weights.make(layer, kernels.device)
        for tokens in TOKENS:
            x = torch.empty(tokens, layer.inner, dtype=torch.bfloat16, device=kernels.device).normal_()
            kernel, library = (
                graph_microseconds([lambda weight=weight, call=call: call(weight) for weight in weights.each])  # type: ignore[misc]
                for call in (by_kernel(kernels, layer, x), by_library(kernels, layer, x))
            )
            floor = floor_bytes(layer, tokens) / bandwidth * 1e6
            run.add(LinearTime(layer.name, layer.size, layer.inner, tokens, kernel, library, floor))
            run.say(
                f"linear {layer.name} M={tokens}: {kernel:.1f} us, {floor / kernel:.0%} of the bandwidth of a"
                f" copy; torch {library:.1f} us, {floor / library:.0%}"
            )
        del weights
        torch.cuda.empty_cache()


def by_kernel(launcher: Launcher, layer: Layer, x: Tensor) -> Callable[[Tensor], Tensor]:
    y = x.new_empty(len(x), layer.size // 2 if layer.gated else layer.size)
    multiply = linear_kernels.linear_gated if layer.gated else linear_kernels.linear

    def call(weight: Tensor) -> Tensor:
        multiply(launcher, x, weight, None, y)
        return y

    return call


def by_library(launcher: Launcher, layer: Layer, x: Tensor) -> Callable[[Tensor], Tensor]:
    if not layer.gated:
        return lambda weight: F.linear(x, weight)
    gated = x.new_empty(len(x), layer.size // 2)

    def call(weight: Tensor) -> Tensor:
        layer_launches.gate(launcher, F.linear(x, weight), gated)
        return gated

    return call
