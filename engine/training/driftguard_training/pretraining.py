"""The resumable AdamW loop shared by pretraining the target and the first distillation of the draft."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

LossFunction = Callable[[int], tuple[torch.Tensor, dict[str, float]]]  # step -> (loss, numbers to show)

_CHECKPOINT_EVERY_STEPS = 100
_REPORT_EVERY_STEPS = 20


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up to `learning_rate`, then a cosine down to `final_share` of it."""

    steps: int
    learning_rate: float
    warmup_steps: int
    final_share: float = 0.1

    def at(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * (self.final_share + (1 - self.final_share) * cosine)


def train(model: nn.Module, loss_at: LossFunction, schedule: Schedule, checkpoint: Path, title: str) -> None:
    """Train in place, continuing the checkpoint of an interrupted run if there is one."""
    optimizer = adamw(model, weight_decay=0.1)
    first = _resume(model, optimizer, checkpoint)
    if first:
        print(f"{title}: resuming at step {first}", flush=True)
    model.train()
    started = time.monotonic()
    for step in range(first, schedule.steps):
        loss, numbers = loss_at(step)
        apply_gradient(model, optimizer, loss, schedule.at(step))
        if (step + 1) % _REPORT_EVERY_STEPS == 0 or step + 1 == schedule.steps:
            _report(title, step + 1, schedule.steps, numbers, time.monotonic() - started, step + 1 - first)
        if (step + 1) % _CHECKPOINT_EVERY_STEPS == 0 or step + 1 == schedule.steps:
            _save(model, optimizer, step + 1, checkpoint)
    model.eval()


def adamw(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """No weight decay on vectors (norms), as usual for transformers."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def apply_gradient(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor, learning_rate: float
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _report(title: str, step: int, steps: int, numbers: dict[str, float], seconds: float, done: int) -> None:
    shown = " ".join(f"{name} {value:.3f}" for name, value in numbers.items())
    left = seconds / done * (steps - step)
    print(f"{title}: step {step}/{steps} {shown} ({seconds:.0f} s, {left:.0f} s left)", flush=True)


def _save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
    partial.replace(path)


def _resume(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> int:
    if not path.is_file():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
