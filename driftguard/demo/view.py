"""What the demo shows while it runs: stages, acceptance per route, the state of the loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from driftguard.demo.traffic import Answer, Traffic, acceptance_rate, tokens_per_second

RECENT_REQUESTS = 60
BARS = "▁▂▃▄▅▆▇█"
HISTORY_POINTS = 48
BAR_CHARACTERS = 10
TITLE_WIDTH = 46  # of the longest title


@dataclass(slots=True)
class Stage:
    """One line of the screen, and one object of the JSON."""

    name: str
    title: str
    started_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    note: str = ""
    part: float | None = None  # that is done, where it is known

    @property
    def seconds(self) -> float:
        return (self.ended_at or time.time()) - self.started_at


@dataclass(slots=True)
class Screen:
    """The live view on a terminal; on anything else one line per finished stage, and one per step of a
    long one."""

    console: Console
    stages: list[Stage] = field(default_factory=list)
    traffic: Traffic | None = None
    state: str = "starting"
    _history: dict[str, list[float]] = field(default_factory=dict)
    _sampled: int = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        if not self.console.is_terminal:
            yield
            return
        with Live(get_renderable=self._render, console=self.console, refresh_per_second=4, transient=False):
            yield

    @contextmanager
    def stage(self, name: str, title: str) -> Iterator[Stage]:
        """The stage is done only when the body returns; an exception leaves it open and ends the demo."""
        stage = Stage(name, title)
        self.stages.append(stage)
        yield stage
        stage.ended_at = time.time()
        if self.console.is_terminal:
            # Above the live view, which would else outgrow the terminal, and be cut off where it changes.
            self.console.print(self._line(stage))
        else:
            self.console.print(
                f"[{stage.seconds:5.1f} s] {stage.title}: {stage.note}", highlight=False, markup=False
            )

    def step(self, text: str) -> None:
        """What a long stage does now: the state of the live view, else a line of its own."""
        self.state = text
        if not self.console.is_terminal:
            self.console.print(f"{'':9} {text}", highlight=False, markup=False)

    def _render(self) -> RenderableType:
        open_stages = [self._line(stage) for stage in self.stages if stage.ended_at is None]
        return Group(*open_stages, Panel(self._acceptance(), title=self.state, title_align="left"))

    def _line(self, stage: Stage) -> RenderableType:
        done = stage.ended_at is not None
        line = Table.grid(padding=(0, 1))
        line.add_column()
        line.add_column()
        line.add_column(width=min(TITLE_WIDTH, self.console.width * 2 // 5))  # notes begin below each other
        line.add_row(
            Text("✓" if done else "…", style="green" if done else "yellow"),
            Text(f"{stage.seconds:5.1f} s", style="dim"),
            Text(stage.title, style="" if done else "bold"),
            Text(stage.note if done or stage.part is None else f"{bar(stage.part)} {stage.note}"),
        )
        return line

    def _acceptance(self) -> RenderableType:
        if self.traffic is None:
            return Text("waiting for the engine")
        answers = self.traffic.answers
        self._sample(answers)
        table = Table("route", "text", "acceptance", "", "requests", box=None, padding=(0, 2))
        for route, domain in self.traffic.load.domains.items():
            mine = [answer for answer in answers if answer.route == route]
            rate = acceptance_rate(mine[-RECENT_REQUESTS:])
            table.add_row(
                route,
                domain,
                "-" if rate is None else f"{rate:.2f}",
                sparkline(self._history.get(route, [])),
                str(len(mine)),
            )
        speed = tokens_per_second(answers[-RECENT_REQUESTS:])
        failed = sum(1 for answer in answers if answer.error)
        return Group(table, Text(f"{speed or 0:.0f} tokens/s   {len(answers)} requests   {failed} failed"))

    def _sample(self, answers: list[Answer]) -> None:
        """One point of the curve per RECENT_REQUESTS // 2 answers, so that it moves with the traffic."""
        while self._sampled + RECENT_REQUESTS <= len(answers):
            window = answers[self._sampled : self._sampled + RECENT_REQUESTS]
            for route in {answer.route for answer in window}:
                rate = acceptance_rate([answer for answer in window if answer.route == route])
                if rate is not None:
                    self._history.setdefault(route, []).append(rate)
            self._sampled += RECENT_REQUESTS // 2


def bar(part: float) -> str:
    full = round(min(max(part, 0.0), 1.0) * BAR_CHARACTERS)
    return "█" * full + "░" * (BAR_CHARACTERS - full)


def sparkline(values: list[float]) -> str:
    """Acceptance rates from 0 to 1 as eighth blocks, newest last."""
    return "".join(BARS[min(int(value * len(BARS)), len(BARS) - 1)] for value in values[-HISTORY_POINTS:])
