"""The parts of a check that measure the loop. Each keeps what it finds row by row."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from driftguard_engine.engine import Engine
from driftguard_engine.models.device_memory import free_bytes

from tests.gpu.check.loop import peers, tracing
from tests.gpu.check.loop.gpt_fast import gpt_fast
from tests.gpu.check.loop.models import Models, Setting
from tests.gpu.check.loop.prefixes import CHUNKS, time_prefixes
from tests.gpu.check.loop.serving import SETTLING_STEPS, Load, ServingFailed, serve
from tests.gpu.check.loop.synthetic import LARGE, SMALL, cache_bytes_per_token, weight_bytes_per_step
from tests.gpu.check.rows import (
    ADAPTIVE,
    BatchTime,
    Checked,
    LoopModels,
    PeerSpeed,
    PlainTime,
    SpeculativeTime,
)
from tests.gpu.check.run import Run
from tests.gpu.check.timing import bandwidth_of

MIDDLE = 0.8  # acceptance of what is measured at one only


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured. drafts: K to choose from, by acceptance."""

    setting: Setting
    drafts: dict[float, tuple[int, ...]]
    batches: tuple[int, ...]
    steps: int
    batch_steps: int
    peer_tokens: int
    learning_steps: int = 50  # before an adaptive K is measured
    shared_tokens: int = 1000  # of prompts that begin alike


def full(device: torch.device) -> Extent:
    setting = Setting(LARGE, device, torch.bfloat16, 64, 1024, prompt_tokens=64)
    drafts: dict[float, tuple[int, ...]] = {0.7: (3, 4, 5, 6), 0.8: (4, 5, 6, 8), 0.9: (6, 8, 12, 16)}
    return Extent(setting, drafts, (1, 2, 4, 8, 16, 32, 64), 200, 60, peer_tokens=128)


def tiny(device: torch.device) -> Extent:
    """To test the measurement itself: its numbers are meaningless."""
    setting = Setting(SMALL, device, torch.float32, 2, 96, prompt_tokens=4)
    return Extent(setting, {0.8: (2, 3)}, (1, 2), 8, 8, peer_tokens=8, learning_steps=8, shared_tokens=64)


@dataclass(frozen=True, slots=True)
class Measurement:
    run: Run
    extent: Extent
    models: Models

    @classmethod
    def begin(cls, run: Run) -> Measurement:
        # As the engine has it, so that no peer waits for its plans either.
        torch.backends.cuda.enable_cudnn_sdp(False)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        extent = full(device) if device.type == "cuda" else tiny(device)
        run.add(LoopModels(extent.setting.pair.name))
        return cls(run, extent, Models(extent.setting, run.say))

    @property
    def best_drafts(self) -> int:
        """K that was best for one request; before that was measured, one in the middle."""
        best, tried = self.run.found().best(MIDDLE), self.extent.drafts[MIDDLE]
        return tried[len(tried) // 2] if best is None else int(best.drafts)

    def load(self, batch: int, drafts: int | None) -> Load:
        return Load(batch, drafts, self.extent.setting.prompt_tokens)

    @contextmanager
    def engine(self, acceptance: float, max_batch: int, **settings: Any) -> Iterator[Engine]:
        made = self.models.engine(acceptance, max_batch, **settings)
        try:
            yield made
            if made.loop_fallback is not None:
                self.run.add(Checked("the loop's fallback", made.loop_fallback, failed=True))
        finally:
            del made
            gc.collect()
            if self.extent.setting.device.type == "cuda":
                torch.cuda.empty_cache()


def plain_decode(run: Run) -> None:
    """One request without speculation; then the calls that wait, and the parts of a step."""
    measure = Measurement.begin(run)
    setting, drafts = measure.extent.setting, measure.best_drafts
    module = measure.models.target_module
    with measure.engine(MIDDLE, 1, num_speculative_tokens=drafts) as engine:
        served = serve(engine, measure.load(1, 0), measure.extent.steps)
    cached = served.context * cache_bytes_per_token(setting.pair.target, setting.dtype)
    on_device = setting.device.type == "cuda"  # elsewhere only the measurement itself is tried
    bandwidth = bandwidth_of(run, setting.device) if on_device else 1e10
    row = PlainTime(served, weight_bytes_per_step(module) + round(cached), bandwidth)
    run.add(row)
    run.say(
        f"without speculation, B=1: {served.milliseconds:.2f} ms a token,"
        f" {row.of_bound:.1%} of the bandwidth of a copy"
    )
    if on_device:
        _trace(measure, ((1, 0), (1, drafts)))


def _trace(measure: Measurement, loads: tuple[tuple[int, int], ...]) -> None:
    """loads: requests, and K, which is 0 or that of the last."""
    run, (most, most_drafts) = measure.run, loads[-1]
    tracing.attach_profiler()
    with measure.engine(MIDDLE, most, num_speculative_tokens=most_drafts) as engine:
        for batch, drafts in loads:
            what = f"B = {batch}, K = {drafts}"
            if run.late(f"the parts of a step, {what}"):
                continue
            with run.row(f"parts of a step, {what}", ServingFailed):
                row = tracing.break_down(engine, measure.load(batch, drafts), what)
                run.add(row)
                told = ", ".join(f"{group} {took:.0f}" for group, took in row.groups.items())
                run.say(f"a step of {what}: {row.milliseconds:.2f} ms; microseconds: {told}")
                counted = tracing.count_synchronisations(engine, measure.load(batch, drafts), what)
                run.add(counted)
                run.say(f"synchronisations: {counted}")


def sweep(run: Run) -> None:
    """K at the acceptance in the middle."""
    _sweep(Measurement.begin(run), MIDDLE)


def other_acceptances(run: Run) -> None:
    measure = Measurement.begin(run)
    for acceptance in measure.extent.drafts:
        if acceptance != MIDDLE:
            _sweep(measure, acceptance)


def _sweep(measure: Measurement, acceptance: float) -> None:
    run, tried = measure.run, measure.extent.drafts[acceptance]
    if run.late(f"speculation at an acceptance of {acceptance:g}"):
        return
    most = max(tried)  # a graph is captured for each K up to this
    with measure.engine(acceptance, 1, num_speculative_tokens=most) as engine:
        without = serve(engine, measure.load(1, 0), measure.extent.steps // 2)
        for drafts in tried:
            what = f"speculation at an acceptance of {acceptance:g}, K = {drafts}"
            if run.late(what):
                continue
            with run.row(what, ServingFailed):
                served = serve(engine, measure.load(1, drafts), measure.extent.steps)
                row = SpeculativeTime(acceptance, 1, str(drafts), served, without)
                run.add(row)
                run.say(_line(row))


def adaptive_batches(run: Run) -> None:
    """With the K that is best for one request, and with the engine's own choice up to that."""
    measure = Measurement.begin(run)
    drafts, most = measure.best_drafts, measure.extent.batches[-1]
    with measure.engine(MIDDLE, most, num_speculative_tokens=drafts, adaptive_k=True) as engine:
        _batches(measure, engine, None)
    free = free_bytes(measure.extent.setting.device)
    with measure.engine(MIDDLE, most, num_speculative_tokens=drafts) as engine:
        if free is not None:  # the models and their caches are in memory already
            taken = free - (free_bytes(measure.extent.setting.device) or 0)
            what = f"memory of an engine of {most} requests, K up to {drafts}"
            run.add(Checked(what, f"{taken / 2**30:.2f} GiB beside weights and caches", failed=False))
            run.say(f"{what}: {taken / 2**30:.2f} GiB")
        _batches(measure, engine, drafts)
    if measure.extent.setting.device.type == "cuda":
        _trace(measure, ((most, 0), (most, drafts)))


def _batches(measure: Measurement, engine: Engine, drafts: int | None) -> None:
    """drafts: K; None: the engine chooses, after it has learned."""
    run, extent = measure.run, measure.extent
    chosen, settling = (ADAPTIVE, extent.learning_steps) if drafts is None else (str(drafts), SETTLING_STEPS)
    for batch in extent.batches:
        what = f"B = {batch}, K {chosen}"
        if run.late(what):
            continue
        with run.row(what, ServingFailed):
            without = serve(engine, measure.load(batch, 0), extent.batch_steps)
            served = serve(engine, measure.load(batch, drafts), extent.batch_steps, settling=settling)
            note = _decision(engine) if drafts is None else ""
            row = BatchTime(MIDDLE, batch, chosen, served, without, note)
            run.add(row)
            run.say(_line(row))


def _decision(engine: Engine) -> str:
    newest = engine.drafting.decision
    return f"last {newest.num_speculative_tokens}, {newest.reason}"


def prefixes(run: Run) -> None:
    measure = Measurement.begin(run)
    shared = measure.extent.shared_tokens
    settings = {"num_speculative_tokens": measure.best_drafts, "prefill_chunk_tokens": shared // CHUNKS}
    with measure.engine(MIDDLE, 1, **settings) as engine:
        row = time_prefixes(engine, shared)
    run.add(row)
    run.say(
        f"first token of {row.prompt_tokens} tokens: {row.new_milliseconds:.1f} ms,"
        f" {row.known_milliseconds:.1f} ms where {row.reused_tokens} are known"
    )


def other_engines(run: Run) -> None:
    measure = Measurement.begin(run)
    models, tokens = measure.models, measure.extent.peer_tokens
    _keep(run, peers.transformers_alone(models, tokens))
    for acceptance, tried in measure.extent.drafts.items():
        if run.late(f"transformers at an acceptance of {acceptance:g}"):
            continue
        best = run.found().best(acceptance)
        drafts = tried[0] if best is None else int(best.drafts)
        for row in peers.transformers_assisted(models, acceptance, drafts, tokens):
            _keep(run, row)
    if not run.late("gpt-fast"):
        _keep(run, gpt_fast(models, MIDDLE, measure.best_drafts, tokens))


def _keep(run: Run, row: PeerSpeed) -> None:
    run.add(row)
    run.say(f"{row.name}, acceptance {row.stated}: {row.tokens_per_second} tokens/s, {row.note}")


def _line(row: SpeculativeTime) -> str:
    served = row.served
    measured = "" if served.acceptance is None else f", {served.acceptance:.3f} measured"
    return (
        f"acceptance {row.stated:g}{measured}, B={row.batch} K={row.drafts} {row.note}:"
        f" {served.milliseconds:.2f} ms a step, {served.tokens_per_second:.0f} tokens/s, {row.speedup:.2f}x"
    )
