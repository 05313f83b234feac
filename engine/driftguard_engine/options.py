"""The options of the engine's command line, by subject; each subject is a panel of --help."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from driftguard_engine.config import HEADS, EngineConfig

BUNDLED = Path(__file__).parent / "bundled"
MODELS, SERVER, LIMITS, SIDECAR = "Models", "Server", "Limits", "Sidecar"


class DrafterName(StrEnum):
    DRAFT_MODEL = "draft_model"
    EAGLE3 = "eagle3"
    EAGLE = "eagle"
    MTP = "mtp"
    PEAGLE = "peagle"
    DFLASH = "dflash"
    DSPARK = "dspark"
    MEDUSA = "medusa"
    STREAMING = "streaming"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    HYBRID = "hybrid"
    LOOKAHEAD = "lookahead"
    SSD = "ssd"
    MIRROR = "mirror"
    TLI = "tli"
    SLEM = "slem"
    NONE = "none"


class DtypeName(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class DeviceName(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


class VerificationName(StrEnum):
    TOKEN = "token"  # noqa: S105 (no secret)
    BLOCK = "block"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _option(meaning: str, panel: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(help=meaning, rich_help_panel=panel)
    return option


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which models serve, and how they decode."""

    target: Annotated[
        str | None,
        _option("Target model: a directory or a hub name. Without it the bundled pair serves.", MODELS),
    ] = None
    draft: Annotated[
        str | None,
        _option(
            "Draft model with the same tokenizer, or with --drafter eagle3, eagle, mtp, peagle, dflash, "
            "dspark, medusa or streaming what was trained of this kind for the target: a directory or a hub "
            "name; with --drafter hybrid any of them but the last two, with tli and slem a draft model with "
            "any tokenizer. With --drafter ngram and suffix a corpus, if there is one. Without it --drafter "
            "mtp takes the layer in the target's own checkpoint.",
            MODELS,
        ),
    ] = None
    corpus: Annotated[
        str | None, _option("With --drafter hybrid: a corpus that is looked up in, if there is one.", MODELS)
    ] = None
    drafter: Annotated[
        str | None,
        _option(
            "What drafts: draft_model (a small model), eagle3, eagle, mtp, peagle, dflash or dspark (heads "
            "that read the target's hidden states), medusa (heads that read its last one, as a tree), "
            "streaming (streams of the target, by an adapter of its top layers, as a tree), ngram "
            "and suffix (what followed the last 2 to 4, or up to 24, tokens before: in the sequence or in a "
            "corpus), hybrid (suffix lookup where it finds a long match, else the draft), lookahead (n-grams "
            "that the target finds further on), ssd and mirror (a draft model, in a process beside the "
            "target), tli and slem (a draft model with another tokenizer: by tokens that both have, or by "
            "text), none, or an installed drafter by its name. "
            "Default: draft_model where there is a draft, else ngram.",
            MODELS,
        ),
    ] = None
    suffix_past_tokens: Annotated[
        int,
        _option(
            "With --drafter suffix and hybrid: look up in the newest so many tokens of ended requests too; "
            "0: off. Clients can then learn from response times what others were answered.",
            MODELS,
        ),
    ] = 0
    suffix_min_match: Annotated[
        int,
        _option("With --drafter hybrid: tokens of a match that is drafted from; below, the draft.", MODELS),
    ] = 3
    prepared_outcomes: Annotated[
        int,
        _option(
            "With --drafter ssd and mirror: outcomes of each verification that drafts are prepared for, for "
            "each request.",
            MODELS,
        ),
    ] = 4
    exit_layer: Annotated[
        int | None,
        _option(
            "With --drafter mirror: the target's layer whose input says what is likely; default: behind 3/4.",
            MODELS,
        ),
    ] = None
    lookahead_window: Annotated[
        int,
        _option(
            "With --drafter lookahead: columns of the window (W), further tokens that a step reads.", MODELS
        ),
    ] = 5
    lookahead_ngram: Annotated[
        int, _option("With --drafter lookahead: tokens of an n-gram (N), 3 or more.", MODELS)
    ] = 4
    lookahead_candidates: Annotated[
        int, _option("With --drafter lookahead: n-grams that a step guesses at most (G).", MODELS)
    ] = 3
    dtype: Annotated[
        DtypeName | None,
        _option("Number format of both models. Default: bfloat16 on CUDA, float32 on the CPU.", MODELS),
    ] = None
    device: Annotated[DeviceName, _option("Where both models run.", MODELS)] = DeviceName.CPU
    threads: Annotated[
        int | None,
        _option(
            "CPU threads of torch. Default: OMP_NUM_THREADS, else one for each core but one, which what "
            "serves the requests needs.",
            MODELS,
        ),
    ] = None
    speculation: Annotated[
        bool, _option("Use speculative decoding. POST /admin/speculation changes it later.", MODELS)
    ] = True
    num_speculative_tokens: Annotated[
        int, _option("Draft tokens per step (K) where a request does not say.", MODELS)
    ] = 4
    adaptive_k: Annotated[
        bool,
        _option(
            "Choose K of each step by measured acceptance and step times, up to the K asked for; "
            "0 where speculation does not pay.",
            MODELS,
        ),
    ] = False
    verification: Annotated[
        VerificationName,
        _option(
            "What is accepted at once: each draft token, or the block of a step, which accepts as many or "
            "more. Both give the target's own distribution.",
            MODELS,
        ),
    ] = VerificationName.TOKEN


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """Limits of requests, and of what runs at once."""

    max_speculative_tokens: Annotated[
        int, _option("Largest K that a request may ask for; at most 1,024.", LIMITS)
    ] = 16
    max_batch: Annotated[int, _option("Requests that run at once.", LIMITS)] = 8
    max_length: Annotated[int, _option("Tokens per request, prompt and output together.", LIMITS)] = 2048
    max_waiting: Annotated[int, _option("Requests that may wait; more are refused with 429.", LIMITS)] = 1024
    prefix_reuse: Annotated[
        bool,
        _option(
            "Where a prompt begins like that of another request that a slot still holds, do not read that "
            "part again. Clients can then learn from response times how the prompts of others begin.",
            LIMITS,
        ),
    ] = True


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the engine is reached, by whom, and how it starts and stops."""

    host: Annotated[
        str,
        _option(
            "Address to bind. Any other than loopback needs DRIFTGUARD_API_KEY or --api-key-hash.", SERVER
        ),
    ] = "127.0.0.1"
    port: Annotated[int, _option("Port to bind; 0 picks a free one.", SERVER)] = 8100
    api_key_hash: Annotated[
        str | None,
        _option("SHA-256 (hex) of the key that /admin asks for, instead of DRIFTGUARD_API_KEY.", SERVER),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        _option(
            "A further host name that the Host header of a request may hold. May be given several times.",
            SERVER,
        ),
    ] = None
    server_name: Annotated[str, _option("This server's name in its records.", SERVER)] = "engine"
    state_dir: Annotated[
        Path | None, _option("Directory that keeps the promoted draft over restarts; one per engine.", SERVER)
    ] = None
    shutdown_seconds: Annotated[
        float, _option("On SIGTERM, seconds that running requests get to finish.", SERVER)
    ] = 30.0
    log_level: Annotated[LogLevel, _option("Lowest level that is logged.", SERVER)] = LogLevel.INFO


@dataclass(frozen=True, slots=True)
class SidecarOptions:
    """What is sent to the sidecar."""

    sidecar: Annotated[
        str | None,
        _option(
            "URL of the DriftGuard sidecar, for example http://127.0.0.1:8200. None: no records.", SIDECAR
        ),
    ] = None
    spool_dir: Annotated[
        Path | None,
        _option(
            "Directory of records that wait while the sidecar is unreachable; one per engine. "
            "Default: ~/.local/share/driftguard/spool/SERVER_NAME.",
            SIDECAR,
        ),
    ] = None
    capture_fraction: Annotated[
        float,
        _option(
            "Part (0 to 1) of the requests whose token ids are sent for retraining. 0 sends none.", SIDECAR
        ),
    ] = 0.0


_SUBJECTS: tuple[type[Any], ...] = (ModelOptions, LimitOptions, ServerOptions, SidecarOptions)


def engine_config(models: ModelOptions, limits: LimitOptions, server: ServerOptions) -> EngineConfig:
    """The engine's config; the bundled pair where no target is given. Raises InvalidConfig."""
    target, draft, drafter = models.target, models.draft, models.drafter
    if target is None:
        target = str(BUNDLED / "target")
        own = (DrafterName.EAGLE3, DrafterName.MEDUSA, DrafterName.STREAMING)
        without = {*HEADS, DrafterName.NGRAM, DrafterName.SUFFIX, DrafterName.LOOKAHEAD, DrafterName.NONE}
        without -= {*own}
        if drafter is None or drafter in {*DrafterName} - without:
            draft = draft or str(BUNDLED / (str(drafter) if drafter in own else "draft"))
    if drafter is None:
        drafter = DrafterName.DRAFT_MODEL if draft else DrafterName.NGRAM
    dtype = models.dtype or (DtypeName.BFLOAT16 if models.device is DeviceName.CUDA else DtypeName.FLOAT32)
    return EngineConfig(
        target=target,
        draft=draft,
        corpus=models.corpus,
        suffix_past_tokens=models.suffix_past_tokens,
        suffix_min_match=models.suffix_min_match,
        prepared_outcomes=models.prepared_outcomes,
        exit_layer=models.exit_layer,
        lookahead_window=models.lookahead_window,
        lookahead_ngram=models.lookahead_ngram,
        lookahead_candidates=models.lookahead_candidates,
        drafter=str(drafter),
        dtype=dtype.value,
        device=models.device.value,
        max_batch=limits.max_batch,
        max_length=limits.max_length,
        num_speculative_tokens=models.num_speculative_tokens,
        max_speculative_tokens=limits.max_speculative_tokens,
        adaptive_k=models.adaptive_k,
        verification=models.verification.value,
        max_waiting=limits.max_waiting,
        prefix_reuse=limits.prefix_reuse,
        threads=models.threads,
        speculation=models.speculation,
        state_dir=server.state_dir,
        server_name=server.server_name,
    )


def one_parameter_per_option(
    command: Callable[[ModelOptions, LimitOptions, ServerOptions, SidecarOptions], None],
) -> Callable[..., None]:
    """`command` with one parameter per option, as typer needs it; typer knows no groups of options."""

    @wraps(command)
    def flat(**given: Any) -> None:
        models, limits, server, sidecar = (
            kind(**{field.name: given[field.name] for field in fields(kind)}) for kind in _SUBJECTS
        )
        command(models, limits, server, sidecar)

    flat.__signature__ = inspect.Signature(list(_parameters()))  # type: ignore[attr-defined]
    return flat


def _parameters() -> Iterator[inspect.Parameter]:
    for kind in _SUBJECTS:
        hints = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            yield inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )
