"""`python -m driftguard_engine`: the command line of the engine."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import typer

from driftguard_engine.options import (
    LimitOptions,
    ModelOptions,
    ServerOptions,
    SidecarOptions,
    engine_config,
    one_parameter_per_option,
)

THREADS_VARIABLE = "OMP_NUM_THREADS"  # torch's own
SPOOL_HOME = Path("~/.local/share/driftguard/spool")
FAILED, BAD_USAGE = 1, 2
LONGEST_NAME = 256
LONGEST_SHUTDOWN_SECONDS = 3600.0

# Boxes would cut off the names of options.
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
@one_parameter_per_option
def main(models: ModelOptions, limits: LimitOptions, server: ServerOptions, sidecar: SidecarOptions) -> None:
    """Serve a language model with speculative decoding, behind OpenAI's HTTP API.

    /v1/completions, /v1/chat/completions and /v1/models are OpenAI's; /health and /metrics are for operators;
    /admin loads drafts and puts them into service.

    On 127.0.0.1 nobody needs a key. Where DRIFTGUARD_API_KEY (or --api-key-hash) is set, /admin asks for it
    as "Authorization: Bearer KEY"; generating text under /v1 never does. The same DRIFTGUARD_API_KEY is
    presented to the sidecar.

    Stop it with SIGTERM or Ctrl+C: running requests finish first, unsent records stay in the spool.
    """
    # Nothing is to be ended yet. Process 1, as in a container, would ignore a signal that nobody handles.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))

    # Heavy imports wait until the options are checked, so that --help and usage errors answer at once.
    from driftguard_engine.config import InvalidConfig
    from driftguard_engine.server.auth import (
        KEY_VARIABLE,
        InvalidKey,
        InvalidKeyHash,
        KeyMissing,
        choose_key_hash,
        key_of,
    )
    from driftguard_engine.server.listener import CannotListen, bind
    from driftguard_engine.server.logs import configure_logs, secrets_of

    secrets = secrets_of(os.environ, sidecar.sidecar, server.api_key_hash)
    configure_logs(server.log_level.value, secrets)
    _check(server, sidecar)
    spool_dir = _spool_dir(server, sidecar) if sidecar.sidecar else None
    try:
        api_key = key_of(os.environ.get(KEY_VARIABLE))
        key_hash = choose_key_hash(server.host, api_key, server.api_key_hash)
        config = engine_config(models, limits, server)
        listener = bind(server.host, server.port)
    except (InvalidKey, KeyMissing, InvalidKeyHash, InvalidConfig) as error:
        _refuse(secrets.masked(str(error)), BAD_USAGE)
    except CannotListen as error:
        _refuse(secrets.masked(str(error)), FAILED)

    import torch

    from driftguard_engine.core import EngineError
    from driftguard_engine.drafters import unended_starts
    from driftguard_engine.drafters.state_file import lock_state
    from driftguard_engine.engine import Engine
    from driftguard_engine.server.app import ServeOptions, serve
    from driftguard_engine.server.cores import usable_cores
    from driftguard_engine.telemetry.spool import SpoolError
    from driftguard_engine.telemetry.telemetry import Telemetry, UnreadableAuthorities, UnusableProxy

    if config.threads is None and THREADS_VARIABLE not in os.environ:
        # Threads that spin until the last of them is done wait for long where it has no core to run on.
        config = replace(config, threads=max(min(torch.get_num_threads(), usable_cores() - 1), 1))
    state_dir = config.state_dir
    try:
        lock = None if state_dir is None else lock_state(state_dir)
    except InvalidConfig as error:
        _refuse(str(error), FAILED)
    refusals = CannotListen, EngineError, SpoolError, InvalidConfig, UnreadableAuthorities, UnusableProxy
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)  # raises KeyboardInterrupt, until it serves
    try:
        given_up = None if state_dir is None else unended_starts.begin(state_dir, time.time())
        engine = Engine(config)
        engine.given_up = given_up
        telemetry = Telemetry(
            sidecar.sidecar,
            spool_dir,
            server.server_name,
            engine.target_name,
            api_key,
            sidecar.capture_fraction,
        )
        options = ServeOptions(
            server.host, server.port, key_hash, server.shutdown_seconds, tuple(server.allowed_host or ())
        )
        code = serve(engine, telemetry, listener, options)
        if code == 0 and state_dir is not None:
            unended_starts.end(state_dir)
    except refusals as error:
        if state_dir is not None:
            unended_starts.end(state_dir)
        _refuse(secrets.masked(str(error)), FAILED)
    except KeyboardInterrupt:  # while it loads: an end on request too
        code = 0
        if state_dir is not None:
            unended_starts.end(state_dir)
    if lock is not None:
        lock.close()
    raise typer.Exit(code)


def _check(server: ServerOptions, sidecar: SidecarOptions) -> None:
    url, fraction = sidecar.sidecar, sidecar.capture_fraction
    if not 0 <= server.port <= 65535:
        _refuse(f"port: {server.port} is not between 0 and 65535", BAD_USAGE)
    if not 0 <= server.shutdown_seconds <= LONGEST_SHUTDOWN_SECONDS:
        _refuse(
            f"shutdown_seconds: {server.shutdown_seconds} is not between 0 and {LONGEST_SHUTDOWN_SECONDS}",
            BAD_USAGE,
        )
    if not 0 <= fraction <= 1:
        _refuse(f"capture_fraction: {fraction} is not between 0 and 1", BAD_USAGE)
    if url is not None and not url.startswith(("http://", "https://")):  # it may hold a password
        _refuse("sidecar: not a URL that begins with http:// or https://", BAD_USAGE)
    if url is not None and not _names_a_host(url):
        _refuse("sidecar: host or port of the URL cannot be read", BAD_USAGE)
    try:
        server.server_name.encode()
    except UnicodeEncodeError:  # no record could be written
        _refuse("server_name: not valid UTF-8", BAD_USAGE)
    if not 1 <= len(server.server_name) <= LONGEST_NAME:
        characters = len(server.server_name)
        _refuse(f"server_name: has {characters} characters, must have 1 to {LONGEST_NAME}", BAD_USAGE)


def _names_a_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises where it is none
    except ValueError:
        return False
    return bool(parts.hostname)


def _spool_dir(server: ServerOptions, sidecar: SidecarOptions) -> Path:
    directory = sidecar.spool_dir or SPOOL_HOME / server.server_name
    try:
        return directory.expanduser()
    except RuntimeError:  # as in a container whose user has no name
        _refuse(
            f"spool_dir: {directory}: there is no such home directory; give --spool-dir, or set HOME",
            BAD_USAGE,
        )


def _refuse(reason: str, code: int) -> NoReturn:
    print(f"driftguard engine: {reason}", file=sys.stderr)
    raise typer.Exit(code)


if __name__ == "__main__":
    app(prog_name="driftguard engine")
