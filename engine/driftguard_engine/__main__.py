"""`python -m driftguard_engine`: the command line of the engine."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

BUNDLED = Path(__file__).parent / "bundled"
SPOOL_HOME = Path("~/.local/share/driftguard/spool")
FAILED, BAD_USAGE = 1, 2
LONGEST_NAME = 256
LONGEST_SHUTDOWN_SECONDS = 3600.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


class DrafterName(StrEnum):
    DRAFT_MODEL = "draft_model"
    NGRAM = "ngram"
    NONE = "none"


class DtypeName(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class DeviceName(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


class LoopName(StrEnum):
    AUTO = "auto"
    HOST = "host"
    DEVICE = "device"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _option(meaning: str, panel: str, *names: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(*names, help=meaning, rich_help_panel=panel)
    return option


MODELS, SERVER, LIMITS, SIDECAR = "Models", "Server", "Limits", "Sidecar"


@app.command()
def main(
    target: Annotated[
        str | None,
        _option("Target model: a directory or a hub name. Without it the bundled pair serves.", MODELS),
    ] = None,
    draft: Annotated[
        str | None, _option("Draft model with the same tokenizer: a directory or a hub name.", MODELS)
    ] = None,
    drafter: Annotated[
        DrafterName | None,
        _option(
            "Who drafts: a draft model, n-gram lookup in the prompt, or nobody. "
            "Default: draft_model where there is a draft, else ngram.",
            MODELS,
        ),
    ] = None,
    dtype: Annotated[DtypeName, _option("Number format of both models.", MODELS)] = DtypeName.FLOAT32,
    device: Annotated[DeviceName, _option("Where both models run.", MODELS)] = DeviceName.CPU,
    loop: Annotated[
        LoopName,
        _option(
            "Where the state of decoding is kept: on the device, so that no step waits for the host, or on "
            "the host. Default: the device's on CUDA where models and kernels allow it.",
            MODELS,
        ),
    ] = LoopName.AUTO,
    threads: Annotated[int | None, _option("CPU threads of torch; without it torch chooses.", MODELS)] = None,
    speculation: Annotated[
        bool, _option("Speculate at all. POST /admin/speculation changes it later.", MODELS)
    ] = True,
    num_speculative_tokens: Annotated[
        int, _option("Draft tokens per step (K) where a request does not say.", MODELS)
    ] = 4,
    adaptive_k: Annotated[
        bool,
        _option(
            "Choose K of each step by what it gives, up to the one asked for; 0 where it does not pay.",
            MODELS,
        ),
    ] = False,
    max_speculative_tokens: Annotated[int, _option("Largest K that a request may ask for.", LIMITS)] = 16,
    max_batch: Annotated[int, _option("Requests that run at once.", LIMITS)] = 8,
    max_length: Annotated[int, _option("Tokens per request, prompt and output together.", LIMITS)] = 2048,
    max_waiting: Annotated[int, _option("Requests that may wait; more are refused with 429.", LIMITS)] = 1024,
    prefix_reuse: Annotated[
        bool,
        _option(
            "Do not read the beginning of a prompt again that a slot still holds from another request. "
            "Whoever may send requests can learn from their times which beginnings others have sent.",
            LIMITS,
        ),
    ] = True,
    host: Annotated[
        str,
        _option(
            "Address to bind. Any other than loopback needs DRIFTGUARD_API_KEY or --api-key-hash.", SERVER
        ),
    ] = "127.0.0.1",
    port: Annotated[int, _option("Port to bind; 0 picks a free one.", SERVER)] = 8100,
    api_key_hash: Annotated[
        str | None,
        _option("SHA-256 (hex) of the key that /admin asks for, instead of DRIFTGUARD_API_KEY.", SERVER),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        _option(
            "A name under which requests may ask for this engine, beside its own; several times for several.",
            SERVER,
        ),
    ] = None,
    server_name: Annotated[str, _option("This server's name in its records.", SERVER)] = "engine",
    state_dir: Annotated[
        Path | None, _option("Directory that remembers the promoted draft over restarts.", SERVER)
    ] = None,
    shutdown_seconds: Annotated[
        float, _option("On SIGTERM, seconds that running requests get to finish.", SERVER)
    ] = 30.0,
    log_level: Annotated[LogLevel, _option("Least level that is logged.", SERVER)] = LogLevel.INFO,
    sidecar: Annotated[
        str | None,
        _option(
            "URL of the DriftGuard sidecar, for example http://127.0.0.1:8200. None: no records.", SIDECAR
        ),
    ] = None,
    spool_dir: Annotated[
        Path | None,
        _option(
            "Where records wait while the sidecar is away; one directory per engine. "
            "Default: ~/.local/share/driftguard/spool/SERVER_NAME.",
            SIDECAR,
        ),
    ] = None,
    capture_fraction: Annotated[
        float,
        _option(
            "Part (0 to 1) of the requests whose token ids are sent for retraining. 0 sends none.", SIDECAR
        ),
    ] = 0.0,
) -> None:
    """Serve a language model with speculative decoding, behind OpenAI's HTTP API.

    /v1/completions, /v1/chat/completions and /v1/models are OpenAI's; /health and /metrics are for operators;
    /admin loads drafts and puts them into service.

    On 127.0.0.1 nobody needs a key. Where DRIFTGUARD_API_KEY (or --api-key-hash) is set, /admin asks for it
    as "Authorization: Bearer KEY"; generating text under /v1 never does. The same DRIFTGUARD_API_KEY is
    presented to the sidecar.

    Stop it with SIGTERM or Ctrl+C: running requests finish first, unsent records stay in the spool.
    """
    # Heavy imports wait until the options are read, so that --help and refusals are quick.
    from driftguard_engine.config import EngineConfig, InvalidConfig
    from driftguard_engine.server.auth import KEY_VARIABLE, InvalidKeyHash, KeyMissing, choose_key_hash
    from driftguard_engine.server.listener import CannotListen, bind
    from driftguard_engine.server.logs import configure_logs, secrets_of

    secrets = secrets_of(os.environ, sidecar, api_key_hash)
    configure_logs(log_level.value, secrets)
    api_key = os.environ.get(KEY_VARIABLE) or None
    if target is None:
        target, draft = str(BUNDLED / "target"), draft or str(BUNDLED / "draft")
    if drafter is None:
        drafter = DrafterName.DRAFT_MODEL if draft else DrafterName.NGRAM
    _check(port, shutdown_seconds, capture_fraction, sidecar, server_name)
    try:
        key_hash = choose_key_hash(host, api_key, api_key_hash)
        config = EngineConfig(
            target=target,
            draft=draft,
            drafter=drafter.value,
            dtype=dtype.value,
            device=device.value,
            max_batch=max_batch,
            max_length=max_length,
            num_speculative_tokens=num_speculative_tokens,
            max_speculative_tokens=max_speculative_tokens,
            adaptive_k=adaptive_k,
            max_waiting=max_waiting,
            prefix_reuse=prefix_reuse,
            loop=loop.value,
            threads=threads,
            speculation=speculation,
            state_dir=state_dir,
            server_name=server_name,
        )
        listener = bind(host, port)
    except (KeyMissing, InvalidKeyHash, InvalidConfig) as error:
        _refuse(secrets.masked(str(error)), BAD_USAGE)
    except CannotListen as error:
        _refuse(secrets.masked(str(error)), FAILED)

    from driftguard_engine.core import EngineError
    from driftguard_engine.engine import Engine
    from driftguard_engine.server.app import ServeOptions, serve
    from driftguard_engine.telemetry.spool import SpoolError
    from driftguard_engine.telemetry.telemetry import Telemetry

    try:
        engine = Engine(config)
        telemetry = Telemetry(
            sidecar,
            (spool_dir or SPOOL_HOME / server_name).expanduser() if sidecar else None,
            server_name,
            engine.target_name,
            api_key,
            capture_fraction,
        )
        options = ServeOptions(host, port, key_hash, shutdown_seconds, tuple(allowed_host or ()))
        code = serve(engine, telemetry, listener, options)
    except (CannotListen, EngineError, SpoolError, InvalidConfig) as error:
        _refuse(secrets.masked(str(error)), FAILED)
    raise typer.Exit(code)


def _check(
    port: int, shutdown_seconds: float, capture_fraction: float, sidecar: str | None, server_name: str
) -> None:
    if not 0 <= port <= 65535:
        _refuse(f"port: {port} is not between 0 and 65535", BAD_USAGE)
    if not 0 <= shutdown_seconds <= LONGEST_SHUTDOWN_SECONDS:
        _refuse(
            f"shutdown_seconds: {shutdown_seconds} is not between 0 and {LONGEST_SHUTDOWN_SECONDS}", BAD_USAGE
        )
    if not 0 <= capture_fraction <= 1:
        _refuse(f"capture_fraction: {capture_fraction} is not between 0 and 1", BAD_USAGE)
    if sidecar is not None and not sidecar.startswith(("http://", "https://")):  # it may hold a password
        _refuse(
            "sidecar: not a URL that begins with http:// or https://", BAD_USAGE
        )  # it may hold a password
    if not 1 <= len(server_name) <= LONGEST_NAME:
        _refuse(f"server_name: has {len(server_name)} characters, must have 1 to {LONGEST_NAME}", BAD_USAGE)


def _refuse(reason: str, code: int) -> NoReturn:
    print(f"driftguard engine: {reason}", file=sys.stderr)
    raise typer.Exit(code)


if __name__ == "__main__":
    app(prog_name="python -m driftguard_engine")
