"""The admin API: shows which draft serves, loads drafts, puts one into service, switches speculation."""

from __future__ import annotations

import hmac
from dataclasses import asdict
from typing import Annotated, Any

import torch
from fastapi import APIRouter
from pydantic import AfterValidator, Field
from starlette.concurrency import run_in_threadpool

from driftguard_engine.server.auth import hash_of
from driftguard_engine.server.body import Body
from driftguard_engine.server.dependencies import Service, TheService
from driftguard_http import Refusal


def _recordable(version: str) -> str:
    if "\0" in version:
        raise ValueError("holds a NUL character, which no record may hold")
    return version


class DraftBody(Body):
    """POST /admin/drafts"""

    directory: Annotated[str, Field(min_length=1)]
    version: Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_recordable)] | None = None


class SpeculationBody(Body):
    """POST /admin/speculation"""

    enabled: bool


async def check_key(key_hash: str | None, authorization: str | None) -> None:
    """Where a key is configured, requests need it as a Bearer token. Raises Refusal (401)."""
    if key_hash is None:
        return
    scheme, _, key = (authorization or "").partition(" ")
    # The hash has a fixed length and no structure, so the time of comparing it reveals nothing of the key.
    if scheme.lower() != "bearer" or not hmac.compare_digest(hash_of(key.strip()), key_hash):
        raise Refusal(
            401, "an API key is needed: Authorization: Bearer KEY", headers={"WWW-Authenticate": "Bearer"}
        )


router = APIRouter(prefix="/admin")  # its key is asked for before routing, see driftguard_engine.server.app


@router.get("/info")
async def info(service: TheService) -> dict[str, Any]:
    return _info(service)


@router.post("/drafts", status_code=201)
async def load_draft(body: DraftBody, service: TheService) -> dict[str, Any]:
    """Loads and prepares a draft, not yet in service. Runs in a worker thread: decoding goes on meanwhile."""
    async with service.loading:  # those that wait need no thread
        return asdict(await run_in_threadpool(service.engine.load_draft, body.directory, body.version))


@router.post("/drafts/{version:path}/activate")  # a version may have slashes
async def activate(version: str, service: TheService) -> dict[str, Any]:
    """New requests use this draft; each running request keeps the one it began with."""
    async with service.swapping:
        return asdict(await run_in_threadpool(service.engine.swap_draft, version))


@router.post("/speculation")
async def set_speculation(body: SpeculationBody, service: TheService) -> dict[str, Any]:
    service.engine.set_speculation(body.enabled)
    return _info(service)


def _info(service: Service) -> dict[str, Any]:
    engine, ahead = service.engine, service.engine.ahead
    return {
        "server": engine.config.server_name,
        "target": engine.target_name,
        "target_directory": engine.target_directory,
        "draft": asdict(engine.draft),
        "activated": engine.activated,  # False: the draft is the configured one, since this process started
        "given_up": engine.given_up,  # not served after restarts any more, see `drafters.unended_starts`
        "uptime_seconds": engine.uptime_seconds,
        "drafts": [asdict(draft) for draft in engine.drafts],
        "speculation": engine.speculation,
        "num_speculative_tokens": engine.config.num_speculative_tokens,
        "suffix_min_match": engine.config.suffix_min_match,
        "threads": torch.get_num_threads(),
        "ngram_tokens": [engine.config.ngram_min_tokens, engine.config.ngram_max_tokens],
        "drafting": asdict(engine.drafting.decision),
        "running": engine.running,
        "waiting": engine.waiting,
        "verification": engine.verification,
        "verify_backend": engine.backend,
        "verify_fallback": engine.backend_fallback,
        "loop_fallback": engine.loop_fallback,
        "ahead": None if ahead is None else ahead.told(),
    }
