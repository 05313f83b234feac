"""Errors that a user may see. Each has an HTTP status and an exit code of the command line."""

from __future__ import annotations


class DriftGuardError(Exception):
    """{detail}

    Base of all expected errors of DriftGuard. `status` is the HTTP status of the
    problem+json answer (RFC 9457), `title` its summary, `exit_code` the exit code of a command.
    """

    status = 500
    title = "Internal error"
    exit_code = 1

    def __init__(self, detail: str, **members: object) -> None:
        super().__init__(detail)
        self.detail = detail
        self.members = members  # extension members of the problem document (RFC 9457 §3.2)


class BadInput(DriftGuardError):
    """The input breaks a rule that the message names."""

    status = 422
    title = "Bad input"
    exit_code = 2


class BadSettings(DriftGuardError):
    """The settings are wrong; the message names the key."""

    title = "Bad settings"
    exit_code = 2


class TooLarge(DriftGuardError):
    """The request is larger than the stated limit."""

    status = 413
    title = "Request too large"


class Busy(DriftGuardError):
    """The queue is full; try again after `retry_after_seconds`."""

    status = 429
    title = "Queue full"

    def __init__(self, detail: str, *, retry_after_seconds: int) -> None:
        super().__init__(detail)
        self.retry_after_seconds = retry_after_seconds


class NotFound(DriftGuardError):
    """The requested object does not exist; the message names it."""

    status = 404
    title = "Not found"


class Conflict(DriftGuardError):
    """The request conflicts with the current state, for example an illegal transition."""

    status = 409
    title = "Conflict"


class Forbidden(DriftGuardError):
    """The caller may not do this; the message says what is needed."""

    status = 403
    title = "Forbidden"


class Unauthorized(DriftGuardError):
    """An API key is missing or unknown."""

    status = 401
    title = "API key needed"


class DatabaseUnavailable(DriftGuardError):
    """The database cannot be reached, or its schema is behind or ahead of this version."""

    status = 503
    title = "Database unavailable"
