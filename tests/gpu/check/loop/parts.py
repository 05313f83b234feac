"""The parts of the loop's measurement. Each adds to what was measured, row by row."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from driftguard_engine.engine import Engine, lost_device

from tests.gpu.check.loop import peers, tracing
from tests.gpu.check.loop.gpt_fast import gpt_fast
from tests.gpu.check.loop.models import Models, Setting
from tests.gpu.check.loop.prefixes import CHUNKS, time_prefixes
from tests.gpu.check.loop.results import ADAPTIVE, LoopMeasured, PlainTime, SpeculativeTime
from tests.gpu.check.loop.serving import SETTLING_STEPS, Load, ServingFailed, serve
from tests.gpu.check.loop.synthetic import LARGE, SMALL, cache_bytes_per_token, weight_bytes_per_step
from tests.gpu.check.timing import copy_bytes_per_second

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
    setting = Setting(LARGE, device, torch.bfloat16, 64, 1024, prompt_tokens=64, most_drafts=16)
    drafts: dict[float, tuple[int, ...]] = {0.7: (3, 4, 5, 6), 0.8: (4, 5, 6, 8), 0.9: (6, 8, 12, 16)}
    return Extent(setting, drafts, (1, 2, 4, 8, 16, 32, 64), 300, 60, peer_tokens=128)


def quick(device: torch.device) -> Extent:
    return Extent(full(device).setting, {0.8: (4, 6)}, (1, 8, 64), 100, 30, peer_tokens=64)


def tiny(device: torch.device) -> Extent:
    """To test the measurement itself: its numbers are meaningless."""
    setting = Setting(SMALL, device, torch.float32, 2, 96, prompt_tokens=4, most_drafts=3)
    return Extent(setting, {0.8: (2, 3)}, (1, 2), 8, 8, peer_tokens=8, learning_steps=8, shared_tokens=64)


@dataclass(frozen=True, slots=True)
class Measurement:
    """found is kept by `keep` whenever a row was added."""

    extent: Extent
    models: Models
    found: LoopMeasured
    keep: Callable[[], None]
    out_of_time: Callable[[], bool]
    say: Callable[[str], None]

    @property
    def acceptance(self) -> float:
        """Of what is measured at one only."""
        return MIDDLE

    @property
    def best_drafts(self) -> int:
        """K that was best for one request; before that was measured, one in the middle."""
        best, tried = self.found.best(MIDDLE), self.extent.drafts[MIDDLE]
        return tried[len(tried) // 2] if best is None else int(best.drafts)

    def load(self, batch: int, drafts: int | None) -> Load:
        return Load(batch, drafts, self.extent.setting.prompt_tokens)

    def add(self, rows: list[Any], row: Any, line: str) -> None:
        rows.append(row)
        self.keep()
        self.say(line)

    def late(self, what: str) -> bool:
        """True: there is no time left, and `what` is named as left out."""
        if self.out_of_time():
            self.found.left_out.append(what)
        return self.out_of_time()

    @contextmanager
    def row(self, what: str) -> Iterator[None]:
        """Reports requests that failed in one row, and goes on with the next: the engine still serves."""
        try:
            yield
        except ServingFailed as problem:
            if self.device_is_lost():
                raise
            self.found.failures.append(f"{what}: {problem}")
            self.say(f"{what} FAILED: {problem}")

    def device_is_lost(self) -> bool:
        device = self.extent.setting.device
        return device.type == "cuda" and lost_device(device) is not None

    @contextmanager
    def engine(self, acceptance: float, max_batch: int, **settings: Any) -> Iterator[Engine]:
        made = self.models.engine(acceptance, max_batch, **settings)
        try:
            yield made
            if made.loop_fallback is not None and made.loop_fallback not in self.found.failures:
                self.found.failures.append(made.loop_fallback)
        finally:
            del made
            gc.collect()
            if self.extent.setting.device.type == "cuda":
                torch.cuda.empty_cache()


def plain(run: Measurement) -> None:
    setting = run.extent.setting
    module = run.models.target_module
    with run.engine(run.acceptance, 1, num_speculative_tokens=run.best_drafts) as engine:
        served = serve(engine, run.load(1, 0), run.extent.steps)
    cached = served.context * cache_bytes_per_token(setting.pair.target, setting.dtype)
    on_device = setting.device.type == "cuda"  # elsewhere only the measurement itself is tried
    bandwidth = copy_bytes_per_second(setting.device) if on_device else 1e10
    run.found.plain = PlainTime(served, weight_bytes_per_step(module) + round(cached), bandwidth)
    run.keep()
    run.say(
        f"without speculation, B=1: {served.milliseconds:.2f} ms a token,"
        f" {run.found.plain.of_bound:.0%} of the bandwidth of a copy"
    )


def speculation(run: Measurement) -> None:
    for acceptance, tried in sorted(run.extent.drafts.items(), key=lambda each: abs(each[0] - MIDDLE)):
        if run.late(f"speculation at an acceptance of {acceptance:g}"):
            continue
        with run.engine(acceptance, 1, num_speculative_tokens=tried[0]) as engine:
            without = serve(engine, run.load(1, 0), run.extent.steps // 2)
            for drafts in tried:
                if run.late(f"speculation at an acceptance of {acceptance:g}, K = {drafts}"):
                    continue
                with run.row(f"acceptance {acceptance:g}, K = {drafts}"):
                    served = serve(engine, run.load(1, drafts), run.extent.steps)
                    row = SpeculativeTime(acceptance, 1, str(drafts), served, without)
                    run.add(run.found.speculation, row, _line(row))


def synchronisations(run: Measurement) -> None:
    _prepare_tracing(run)
    most = run.extent.batches[-1]
    with run.engine(run.acceptance, most, num_speculative_tokens=run.best_drafts) as engine:
        for batch, drafts in ((1, 0), (1, run.best_drafts), (most, run.best_drafts)):
            what = f"B = {batch}, K = {drafts}"
            row = tracing.count_synchronisations(engine, run.load(batch, drafts), what)
            run.add(run.found.synchronisations, row, f"synchronisations, {what}: {row}")


def breakdown(run: Measurement) -> None:
    _prepare_tracing(run)
    most = run.extent.batches[-1]
    with run.engine(run.acceptance, most, num_speculative_tokens=run.best_drafts) as engine:
        for batch, drafts in ((1, 0), (1, run.best_drafts), (most, 0), (most, run.best_drafts)):
            what = f"B = {batch}, K = {drafts}"
            if run.late(f"the parts of a step, {what}"):
                continue
            with run.row(f"parts of a step, {what}"):
                row = tracing.break_down(engine, run.load(batch, drafts), what)
                run.add(run.found.breakdowns, row, f"a step of {what}: {row.milliseconds:.2f} ms")


def batches(run: Measurement) -> None:
    """With the K that is best for one request, and with the engine's own choice up to that."""
    drafts, most = run.best_drafts, run.extent.batches[-1]
    with run.engine(run.acceptance, most, num_speculative_tokens=drafts) as engine:
        _batches(run, engine, drafts)
    adaptive = {"adaptive_k": True, "max_speculative_tokens": drafts}
    with run.engine(run.acceptance, most, num_speculative_tokens=drafts, **adaptive) as engine:
        _batches(run, engine, None)


def _batches(run: Measurement, engine: Engine, drafts: int | None) -> None:
    """drafts: K; None: the engine chooses, after it has learned."""
    learning = run.extent.learning_steps
    chosen, settling = (ADAPTIVE, learning) if drafts is None else (str(drafts), SETTLING_STEPS)
    for batch in run.extent.batches:
        if run.late(f"B = {batch}, K {chosen}"):
            continue
        with run.row(f"B = {batch}, K {chosen}"):
            without = serve(engine, run.load(batch, 0), run.extent.batch_steps)
            served = serve(engine, run.load(batch, drafts), run.extent.batch_steps, settling=settling)
            note = _decision(engine) if drafts is None else ""
            row = SpeculativeTime(run.acceptance, batch, chosen, served, without, note)
            run.add(run.found.batches, row, _line(row))


def prefixes(run: Measurement) -> None:
    shared = run.extent.shared_tokens
    chunked = {"prefill_chunk_tokens": shared // CHUNKS}
    with run.engine(run.acceptance, 1, num_speculative_tokens=run.best_drafts, **chunked) as engine:
        row = run.found.prefix = time_prefixes(engine, shared)
    run.keep()
    run.say(
        f"first token of {row.prompt_tokens} tokens: {row.new_milliseconds:.1f} ms,"
        f" {row.known_milliseconds:.1f} ms where {row.reused_tokens} are known"
    )


def _decision(engine: Engine) -> str:
    newest = engine.drafting.decision
    return f"last {newest.num_speculative_tokens}, {newest.reason}"


def transformers(run: Measurement) -> None:
    alone = peers.transformers_alone(run.models, run.extent.peer_tokens)
    run.add(run.found.peers, alone, f"{alone.name}: {alone.tokens_per_second:.1f} tokens/s")
    for acceptance in run.extent.drafts:
        if run.late(f"transformers at an acceptance of {acceptance:g}"):
            continue
        best = run.found.best(acceptance)
        drafts = run.extent.drafts[acceptance][0] if best is None else int(best.drafts)
        for row in peers.transformers_assisted(run.models, acceptance, drafts, run.extent.peer_tokens):
            run.add(
                run.found.peers,
                row,
                f"{row.name} at {acceptance:g}: {row.tokens_per_second:.0f} tokens/s, {row.note}",
            )


def other_engines(run: Measurement) -> None:
    row = gpt_fast(run.models, run.acceptance, run.best_drafts, run.extent.peer_tokens)
    run.add(run.found.peers, row, f"{row.name}: {row.tokens_per_second} tokens/s, {row.note}")


Part = Callable[[Measurement], None]
PARTS: dict[str, Part] = {
    "decoding without speculation": plain,
    "speculation": speculation,
    "batches": batches,
    "prompts that begin alike": prefixes,
    "synchronisations": synchronisations,
    "parts of a step": breakdown,
    "transformers": transformers,
    "gpt-fast": other_engines,
}


def _prepare_tracing(run: Measurement) -> None:
    if run.extent.setting.device.type != "cuda":
        raise ServingFailed("needs a CUDA device")
    tracing.attach_profiler()


def _line(row: SpeculativeTime) -> str:
    served = row.served
    measured = "" if served.acceptance is None else f", {served.acceptance:.3f} measured"
    return (
        f"acceptance {row.stated:g}{measured}, B={row.batch} K={row.drafts} {row.note}:"
        f" {served.milliseconds:.2f} ms a step, {served.tokens_per_second:.0f} tokens/s, {row.speedup:.2f}x"
    )
