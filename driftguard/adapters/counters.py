"""Engines that count steps, draft tokens and accepted tokens: vLLM, its relatives, llama.cpp.

The bonus token is in none of these counters; a step without a draft adds to none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from driftguard.adapters.adapter import Kind
from driftguard.adapters.reading import Increase, Reading, sums_and_counts
from driftguard.adapters.window import Identity, Window
from driftguard.records import Fidelity

# Draft tokens of a window in steps of what is printed: rounding then moves its acceptance by .005 at most.
LEAST_STEPS: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterAdapter:
    """An adapter by names of series. `sum over count`: a histogram's name without _sum and _count."""

    kind: Kind
    name: str
    prefix: str
    steps: str
    drafted: str
    accepted: str
    accepted_per_position: str
    generated: str
    prompts: str
    show_metrics: str
    speculate: str
    running: str | None = None  # gauge: requests in flight
    waiting: str | None = None  # gauge: requests in the queue
    ttft: str | None = None  # sum over count: seconds to the first token
    decode_seconds: tuple[
        str, ...
    ] = ()  # counter: seconds between the tokens of all requests; newest name first
    counts_as_it_goes: bool = False  # tokens, each as it is made; else those of a request at its end
    positions_are_k: bool = False  # a series for each of the K positions from the start
    names_target: bool = True
    significant_digits: int = 17  # of all counters but those of positions; 17: exact
    path: str = "/metrics"
    fidelity: Fidelity = "counter"

    @property
    def _counters(self) -> frozenset[str]:
        single = (
            self.steps,
            self.drafted,
            self.accepted,
            self.accepted_per_position,
            self.generated,
            self.prompts,
        )
        found = {*single, *self.decode_seconds}
        return (sums_and_counts(self.ttft) if self.ttft else frozenset()) | found

    @property
    def names(self) -> frozenset[str]:
        return self._counters | {name for name in (self.running, self.waiting) if name}

    def windows(self, before: Reading, after: Reading, known: Identity) -> Sequence[Window]:
        increase = Increase.between(before, after, self._counters)
        counted = self.drafted if after.of(self.drafted) else self.generated
        if not self.names_target:
            return [self._window(None, increase, before, after, known)] if after.of(counted) else []
        targets = sorted(after.values_of(counted, "model_name"))
        return [self._window(target, increase, before, after, known) for target in targets]

    def _window(
        self, target: str | None, increase: Increase, before: Reading, after: Reading, known: Identity
    ) -> Window:
        labels = {} if target is None else {"model_name": target}
        per_position = increase.per_position(self.accepted_per_position, "position", **labels)
        generated = increase.whole(self.generated, **labels) or 0
        running = self._running(after, labels)
        window = Window(
            target=target,
            begun_at=increase.begun_at,
            ended_at=after.at,
            steps=increase.whole(self.steps, **labels) or 0,
            drafted=increase.whole(self.drafted, **labels) or 0,
            accepted=increase.whole(self.accepted, **labels) or 0,
            generated=generated,
            fidelity=self.fidelity,
            speculated_before=bool(after.total(self.drafted, **labels)),
            accepted_per_position=per_position,
            num_speculative_tokens=known.num_speculative_tokens
            or (len(per_position) if per_position and self.positions_are_k else None),
            prompt_tokens=increase.whole(self.prompts, **labels),
            time_to_first_token_seconds=increase.mean(self.ttft, **labels) if self.ttft else None,
            time_per_output_token_seconds=self._seconds_per_token(increase, labels),
            concurrency=running,
            counts_drafts=bool(after.of(self.drafted)),
            is_stalled=self.counts_as_it_goes
            and not generated
            and bool(running and self._running(before, labels)),
            waiting_requests=after.whole(self.waiting, **labels) if self.waiting else None,
            started_requests=increase.whole(f"{self.ttft}_count", **labels) if self.ttft else None,
        )
        step = self._printed_step(after, self.drafted, labels)
        return window if step == 1 else self._rounded(window, step, after, labels)

    def _running(self, reading: Reading, labels: dict[str, str]) -> int | None:
        return reading.whole(self.running, **labels) if self.running else None

    def _rounded(self, window: Window, step: int, after: Reading, labels: dict[str, str]) -> Window:
        """Its counts are printed in such steps; those of positions are exact, and give what was accepted."""
        kept = window.accepted_per_position or [0]
        steps = max(window.steps, kept[0])
        least = LEAST_STEPS * step
        # That nothing was drafted shows where as much was generated as a window must have drafted.
        stopped = LEAST_STEPS * max(step, self._printed_step(after, self.generated, labels))
        has_stopped = not window.drafted and not sum(kept) and (window.generated or 0) >= stopped
        return replace(
            window,
            steps=steps,
            drafted=max(window.drafted, sum(kept), steps if window.drafted else 0),
            accepted=sum(kept),
            precision=f"{self.name} prints its counters with {self.significant_digits} digits, now in steps "
            f"of {step:,} draft tokens: a window has at least {least:,}",
            goes_on=window.drafted < least and not has_stopped,
        )

    def _printed_step(self, after: Reading, name: str, labels: dict[str, str]) -> int:
        """What the last digit of a counter stands for; 1 where it is exact."""
        digits = len(str(after.whole(name, **labels) or 0))
        return int(10 ** max(digits - self.significant_digits, 0))

    def _seconds_per_token(self, increase: Increase, labels: dict[str, str]) -> float | None:
        """A ratio of sums; decode_seconds do not include the first token of a request."""
        told = (increase.of(name, **labels) for name in self.decode_seconds)
        seconds = next((value for value in told if value is not None), None)
        tokens = increase.of(self.generated, **labels)
        first = increase.of(f"{self.ttft}_count", **labels) if self.ttft else 0.0
        if seconds is None or tokens is None or tokens <= (first or 0.0):
            return None
        return seconds / (tokens - (first or 0.0))
