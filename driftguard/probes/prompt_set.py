"""Making a server's set of canary prompts: from a file, or chosen from its captured traffic."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Final

from sqlalchemy.orm import Session

from driftguard.errors import BadInput, Conflict
from driftguard.probes.prompts import Prompt, checked, prompt_of, read_prompts
from driftguard.store import probe_prompts
from driftguard.store.probe_prompts import StoredPrompt

MAXIMUM_PROMPT_TOKENS: Final = 2_048  # of a captured prompt: probes must stay cheap


def make(
    session: Session,
    server: str,
    *,
    file: Path | None,
    per_segment: int,
    is_replacing: bool,
    now: datetime,
) -> list[Prompt]:
    """Stores the set. Raises BadInput (the file, or too few captured prompts), Conflict (there is a set).

    Captured prompts are kept with the set beyond the retention of captures, until the set is replaced.
    """
    if probe_prompts.of_server(session, server) and not is_replacing:
        raise Conflict(
            f"{server} has canary prompts already; --replace makes a new set, which has no earlier replays"
        )
    prompts = read_prompts(file) if file else _chosen(session, server, per_segment)
    stored = [StoredPrompt(prompt.key, prompt.segment, prompt.body) for prompt in prompts]
    probe_prompts.replace(session, server, stored, now)
    return prompts


def _chosen(session: Session, server: str, per_segment: int) -> list[Prompt]:
    captured = probe_prompts.captured_prompts(session, server, per_segment, MAXIMUM_PROMPT_TOKENS)
    if not captured:
        raise BadInput(
            f"no captured requests of {server} to choose from: set capture.enabled and wait, or give --file"
        )
    prompts = [prompt_of({"prompt": tokens}, segment) for segment, tokens in captured]
    return checked(prompts, f"captured traffic of {server}")
