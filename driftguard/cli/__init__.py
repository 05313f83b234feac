"""The command line."""

from __future__ import annotations

import sys

try:  # loading takes a second, and longer on a busy machine
    from driftguard.cli.main import app, main
except KeyboardInterrupt:
    sys.exit(130)

__all__ = ["app", "main"]
