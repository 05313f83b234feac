"""This machine: versions, what training needs, files and their permissions, room on the disk."""

from __future__ import annotations

import os
import platform
import shutil
import stat
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Final

from driftguard.app.doctor.finding import Finding, State
from driftguard.outgoing import posting
from driftguard.retraining.engines.candidate_kind import torch_version
from driftguard.retraining.training.draft_files import is_here
from driftguard.settings import Settings
from driftguard.settings.secrets import secrets_of
from driftguard.store.migrations import head_revision

FULL_BYTES: Final = 2**30
TIGHT_BYTES: Final = 5 * 2**30


def versions() -> Iterator[Finding]:
    told = f"driftguard {version('driftguard-llm')}, Python {platform.python_version()}"
    yield Finding("versions", "ok", f"{told}, schema {head_revision()}")


def authorities() -> Iterator[Finding]:
    """Nothing where they can be read. Else the sidecar does not start, and neither an engine nor a
    destination of pages can be asked anything."""
    try:
        posting.authorities()
    except ValueError as error:
        fix = "SSL_CERT_FILE = a file of certificates (PEM) that this user can read, or unset it"
        yield Finding("authorities", "failed", str(error), fix)


def training(settings: Settings) -> Iterator[Finding]:
    """Nothing where no engine is configured."""
    if settings.engines:
        found = torch_version()
        yield _no_torch() if found is None else Finding("training", "ok", f"torch {found}")
        if found is not None:
            yield from _models(settings)
    if command := settings.retraining.promote_command:
        if shutil.which(command[0]) is None:
            told = f"retraining.promote_command: there is no program {command[0]}"
            yield Finding("promotion", "failed", told, "the whole path of the program, and its x permission")
        else:
            yield Finding("promotion", "ok", f"{command[0]} is there")


def _no_torch() -> Finding:
    """A nightly job may run elsewhere, as in the engine's image."""
    told = "torch is not installed, so no draft is trained here, and no incident starts a retraining"
    fix = "driftguard retrain where torch is, with the same data_dir, or pip install 'driftguard-llm[engine]'"
    return Finding("training", "warning", told, fix)


def _models(settings: Settings) -> Iterator[Finding]:
    """Of engines that do not tell by themselves where theirs are."""
    for engine in settings.engines:
        given = [one for one in (engine.target_directory, engine.draft_directory) if one is not None]
        if not given:
            continue
        missing = [str(one) for one in given if not is_here(_expanded(one))]
        check = f"models of {engine.server}"
        if not missing:
            yield Finding(check, "ok", " and ".join(map(str, given)))
            continue
        state: State = "failed" if settings.retraining.automatic else "warning"
        told = f"{' and '.join(missing)}: no directory on this machine that this user may read"
        fix = (
            "target_directory and draft_directory of this engine as they are here, or mounted at these paths"
        )
        if settings.retraining.automatic:
            fix += "; retraining.automatic = false where only a nightly job elsewhere trains"
        yield Finding(check, state, told, fix)


def _expanded(directory: Path) -> Path:
    """As it is where there is no such home directory."""
    try:
        return directory.expanduser()
    except RuntimeError:
        return directory


def files(settings: Settings, config: Path | None) -> Iterator[Finding]:
    if config is not None:
        yield _config(settings, config)
    place = _existing(settings.data_directory)
    if place is None:
        fix = "let this user enter the directories above it, or set data_dir"
        yield Finding("data directory", "failed", f"{settings.data_directory} cannot be reached", fix)
    elif not os.access(place, os.W_OK | os.X_OK) and place != settings.data_directory:
        make = f"install -d -o {os.getuid()} {settings.data_directory}"
        told = f"{settings.data_directory} cannot be made"
        yield Finding("data directory", "failed", told, f"make it for this user, or set data_dir ({make})")
    elif not os.access(place, os.W_OK | os.X_OK):
        fix = f"let this user write there, or set data_dir (chown {os.getuid()} {place})"
        yield Finding("data directory", "failed", f"{place} cannot be written", fix)
    elif place == settings.data_directory and place.stat().st_mode & stat.S_IWOTH:
        fix = f"chmod o-w {place}, or, where it is a volume such as an emptyDir, data_dir = a directory in it"
        yield Finding("data directory", "failed", f"every user may write into {place}", fix)
    else:
        yield Finding("data directory", "ok", f"{settings.data_directory} can be written")


def _config(settings: Settings, config: Path) -> Finding:
    mode = config.stat().st_mode
    text = config.read_text(encoding="utf-8")
    has_secrets = secrets_of(settings).masked(text) != text
    if has_secrets and mode & (stat.S_IRGRP | stat.S_IROTH):
        told = f"{config} has keys or passwords, and other users may read it ({stat.filemode(mode)})"
        return Finding("settings", "warning", told, f"chmod 600 {config}")
    return Finding("settings", "ok", f"{config}")


def disk(settings: Settings) -> Iterator[Finding]:
    """Of data_dir: embedded database with records and captures, drafts, spool files."""
    place = _existing(settings.data_directory)
    if place is None:
        return  # which has been told
    free = shutil.disk_usage(place).free
    told = f"{free / 2**30:,.1f} GiB free for {settings.data_directory}"
    if free >= TIGHT_BYTES:
        yield Finding("disk", "ok", told)
        return
    fix = "another data_dir, or less: retention.records_days, captures_days, retraining.keep_candidates"
    yield Finding("disk", "failed" if free < FULL_BYTES else "warning", told, fix)


def _existing(path: Path) -> Path | None:
    """The directory, or the nearest above it that exists; None where this user may not see it."""
    try:
        return next(parent for parent in (path, *path.parents) if parent.exists())
    except OSError:
        return None
