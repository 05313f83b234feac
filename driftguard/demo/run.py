"""`driftguard demo`: starts engine and sidecar as a user would, runs the stages, and stops both again."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape

from driftguard.demo import stages
from driftguard.demo.processes import (
    DATA,
    DemoFailed,
    Process,
    end_database,
    free_url,
    sidecar_config,
    start_engine,
    start_sidecar,
)
from driftguard.demo.receiver import Receiver
from driftguard.demo.report import in_words, summary_table, write_json
from driftguard.demo.scenes import OF_LOOKUPS, OF_MODELS
from driftguard.demo.sidecar_client import SidecarClient
from driftguard.demo.stages import Facts, Loop
from driftguard.demo.stopping import Stopped, Stops
from driftguard.demo.traffic import Load, Traffic
from driftguard.demo.view import Screen, Stage
from driftguard.errors import BadInput

START_SECONDS = 90.0
UNWRAPPED = 10_000  # characters of a line, where standard output is no terminal

Play = Callable[[Loop, Stage], dict[str, Any]]
STORY: tuple[tuple[str, str, Play], ...] = (
    ("without_speculation", "A few requests without speculation", stages.without_speculation),
    ("baseline", "Known traffic: learn the baseline", stages.baseline),
    ("mix_shift", "Shift the mix of known traffic", stages.mix_shift),
    ("drift", "Shift 'code' to text the draft does not know", stages.drift),
    ("page", "Page", stages.page),
    ("retrain", "Retrain, gate, promote", stages.retrain),
    ("recovery", "Watch the new draft", stages.recovery),
)
# Nothing is drafted by lookup of what was never seen.
STORY_OF_LOOKUPS = (
    STORY[0],
    ("first_corpus", "Known traffic: make a first corpus", stages.first_corpus),
    *STORY[1:],
)


@dataclass(frozen=True, slots=True)
class DemoOptions:
    json_file: Path | None
    alertmanager_url: str | None
    keep: bool
    seed: int
    log_directory: Path | None
    method: str = "draft_model"


def run_demo(options: DemoOptions) -> int:
    """Runs the demo; 0 if every stage succeeded, 1 otherwise (and prints which failed), 128 + the number of
    the signal that ended it before.

    On Ctrl-C, SIGTERM, and when its terminal is closed, it ends what it started, too. Raises BadInput, before
    anything is started: a file that cannot be written, an Alertmanager that does not answer, a used log
    directory.
    """
    _check(options)
    stops = Stops()
    console = Console() if sys.stdout.isatty() else Console(width=UNWRAPPED)
    facts = Facts(seed=options.seed)
    with ExitStack() as stack:
        directory = options.log_directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        try:
            _play(options, console, facts, directory, stack, stops)
        except (DemoFailed, httpx.HTTPError) as error:
            console.print(f"[bold red]The demo failed:[/] {escape(str(error))}", highlight=False)
            console.print(_where_logs_are(options.log_directory), highlight=False, markup=False)
        except Stopped as stopped:
            console.print("stopped; ending the engine and the sidecar")
            if not facts.happened:
                return 128 + stopped.number
        finally:
            stops.end()
            if options.json_file:
                write_json(facts, options.json_file)
        return 0 if facts.happened else 1


def _where_logs_are(kept: Path | None) -> str:
    if kept is None:
        return "With --log-dir DIRECTORY the logs of engine and sidecar are kept there."
    return f"The logs of engine and sidecar are in {kept}."


def _check(options: DemoOptions) -> None:
    if options.json_file is not None:
        try:
            options.json_file.open("a").close()
        except OSError as error:
            raise BadInput(f"--json: {options.json_file} cannot be written: {error.strerror}") from error
    if options.log_directory is not None and options.log_directory.is_file():
        raise BadInput(f"--log-dir: {options.log_directory} is not a directory")
    if options.log_directory is not None and (options.log_directory / DATA).exists():
        raise BadInput(f"--log-dir: {options.log_directory} holds an earlier demo; name another directory")
    if options.alertmanager_url is not None:
        _check_alertmanager(options.alertmanager_url)


def _check_alertmanager(url: str) -> None:
    try:
        httpx.get(f"{url.rstrip('/')}/api/v2/status", timeout=5.0).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BadInput(f"--alertmanager: no Alertmanager answers at {url}: {error}") from error


def _play(
    options: DemoOptions, console: Console, facts: Facts, directory: Path, stack: ExitStack, stops: Stops
) -> None:
    screen = Screen(console)
    with screen.running():
        with screen.stage("start", "Start engine and sidecar") as stage:
            loop, idle_engines = _start(options, screen, stage, facts, directory, stack, stops)
            stage.note = f"status page: {loop.sidecar.base_url}/"
        facts.stages["start"] = {"seconds": stage.seconds}
        story = STORY_OF_LOOKUPS if loop.scene is OF_LOOKUPS else STORY
        compare: Play = partial(stages.compare_speeds, idle_engines)
        scenes = [*story, ("compare_speeds", "Compare speeds, in turns", compare)]
        for name, title, play in scenes:
            with screen.stage(name, title) as stage:
                facts.stages[name] = play(loop, stage)
            facts.stages[name]["seconds"] = stage.seconds
            _refuse_failures(loop)
    facts.happened = True
    console.print(summary_table(facts, framed=console.is_terminal))
    for line in in_words(facts):
        console.print(line, highlight=False)
    console.print(
        f"{facts.requests} requests, {facts.failed_requests} failed, the draft was swapped under traffic"
    )
    if options.keep:
        _stay(console, loop)


def _refuse_failures(loop: Loop) -> None:
    failed = [answer for answer in loop.traffic.answers if answer.error]
    loop.facts.requests, loop.facts.failed_requests = len(loop.traffic.answers), len(failed)
    if failed:
        raise DemoFailed(f"{len(failed)} requests failed; the first: {failed[0].error}")


def _start(
    options: DemoOptions,
    screen: Screen,
    stage: Stage,
    facts: Facts,
    directory: Path,
    stack: ExitStack,
    stops: Stops,
) -> tuple[Loop, stages.IdleEngines]:
    receiver = None if options.alertmanager_url else Receiver()
    if receiver is not None:
        stack.callback(receiver.close)
    engine_url, sidecar_url = free_url(), free_url()
    scene = OF_LOOKUPS if options.method == "suffix" else OF_MODELS
    traffic = Traffic(
        engine_url,
        Load(scene.weights, scene.known),
        options.seed,
        temperature=scene.temperature,
        asked_again=scene.prompts,
        fresh=scene.fresh,
    )
    webhooks = [receiver.url] if receiver else []
    alertmanagers = [options.alertmanager_url] if options.alertmanager_url else []
    config = sidecar_config(directory, engine_url, sidecar_url, webhooks, alertmanagers)

    def started(start: Callable[[], Process]) -> Process:
        with stops.held():
            process = start()
            stack.callback(process.stop)
        return process

    @contextmanager
    def idle_engines(count: int) -> Iterator[list[str]]:
        urls = [free_url() for _ in range(count)]
        idle = [
            started(partial(start_engine, directory, url, None, options.method, name=f"idle-engine-{number}"))
            for number, url in enumerate(urls, start=1)
        ]
        for process, url in zip(idle, urls, strict=True):
            process.wait_ready(f"{url}/health", START_SECONDS)
        yield urls
        for process in idle:
            process.stop()

    stack.callback(end_database, directory)
    sidecar = started(lambda: start_sidecar(directory, sidecar_url, config))
    engine = started(lambda: start_engine(directory, engine_url, sidecar_url, options.method))
    _tell(stage, 0.25, "cutting prompts out of text on this machine")
    traffic.prepare(scene.all_domains)
    stack.callback(traffic.stop)
    _tell(stage, 0.5, "loading the models")
    engine.wait_ready(f"{engine_url}/health", START_SECONDS)
    _tell(stage, 0.75, "making a database")
    sidecar.wait_ready(f"{sidecar_url}/readyz", START_SECONDS)
    screen.traffic = traffic
    screen.state = "running"
    client = SidecarClient(sidecar_url)
    alertmanager = options.alertmanager_url
    return Loop(screen, traffic, client, receiver, alertmanager, facts, scene), idle_engines


def _tell(stage: Stage, part: float, note: str) -> None:
    stage.part, stage.note = part, note


def _stay(console: Console, loop: Loop) -> None:
    loop.traffic.pause_seconds = stages.BACKGROUND_PAUSE_SECONDS
    loop.traffic.resume()
    console.print(f"Status page: {loop.sidecar.base_url}/   traffic goes on (Ctrl-C ends the demo)")
    while True:
        time.sleep(1.0)
