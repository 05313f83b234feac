"""How many files and connections this process may have open at once."""

from __future__ import annotations

import resource
from typing import Final

import structlog

WANTED: Final = 65_536
ENOUGH: Final = 8_192  # a connection each: senders, sources, scrapers, and the database's
_log = structlog.get_logger(__name__)


def raise_limit() -> int:
    """Raises the soft limit up to the hard one, and warns if that is too low. Returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _possible(soft, hard)
    if limit != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        _log.info("open_files_limit_raised", before=soft, now=limit)
    if 0 <= limit < ENOUGH:
        _log.warning("open_files_limit_is_low", limit=limit, enough=ENOUGH, hint="LimitNOFILE, ulimit -Hn")
    return limit


def _possible(soft: int, hard: int) -> int:
    """Unlimited (-1) stays unlimited."""
    if soft == resource.RLIM_INFINITY or soft >= WANTED:
        return soft
    return WANTED if hard == resource.RLIM_INFINITY else max(soft, min(hard, WANTED))
