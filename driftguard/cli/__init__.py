"""The command line."""

from __future__ import annotations

from driftguard.cli.main import app, main

__all__ = ["app", "main"]
