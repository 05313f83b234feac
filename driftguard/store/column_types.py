"""Types of columns: finite numbers, and documents of JSON that hold a type.

Only finite numbers are stored, and this is the one place that sees to it. PostgreSQL
refuses Infinity and NaN in JSON, and takes them in columns, where every reader would meet them. Each column
of numbers or documents checks what is bound to it, and names itself in the refusal. Records come by COPY and
are checked where they are made (driftguard.records.check_record).

A document that holds a type is decoded where its row is read and encoded where it is written.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
from sqlalchemy import Dialect, Double, Engine, Table, event
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.sql.operators import OperatorType
from sqlalchemy.types import TypeDecorator, TypeEngine

from driftguard.errors import DriftGuardError

_UNNAMED: Final = "a value"


class NotFinite(DriftGuardError):
    """{where}: {value} is not a finite number"""


class UnreadableDocument(DriftGuardError):
    """{table}.{column} holds a document that this version cannot read: {what is wrong, and where}"""


def refuse_not_finite(value: object, where: str) -> None:
    """Looks through a document of dicts, lists and tuples. Raises NotFinite, which names the first place."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise NotFinite(f"{where}: {value} is not a finite number")
    elif isinstance(value, dict):
        for key, part in value.items():
            refuse_not_finite(part, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for place, part in enumerate(value):
            refuse_not_finite(part, f"{where}[{place}]")


class FiniteDouble(TypeDecorator[float]):
    """double precision without Infinity and NaN."""

    impl = Double
    cache_ok = True

    def __init__(self, where: str = _UNNAMED) -> None:
        super().__init__()
        self.where = where

    def process_bind_param(self, value: float | None, dialect: Dialect) -> float | None:  # noqa: ARG002
        refuse_not_finite(value, self.where)
        return value


class FiniteDocument(TypeDecorator[Any]):
    """jsonb, whose refusals name the place inside the document. `none_as_null`: as in JSONB."""

    impl = JSONB
    cache_ok = True

    def __init__(self, where: str = _UNNAMED, *, none_as_null: bool = False) -> None:
        super().__init__(none_as_null=none_as_null)
        self.where = where
        self.none_as_null = none_as_null
        self.should_evaluate_none = not none_as_null

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:  # noqa: ARG002
        refuse_not_finite(value, self.where)
        return value

    def named(self, where: str) -> FiniteDocument:
        """The same, of a column that is known by then."""
        return FiniteDocument(where, none_as_null=self.none_as_null)

    def coerce_compared_value(self, op: OperatorType | None, value: Any) -> TypeEngine[Any]:
        """A key of the document is no document."""
        return self.impl_instance.coerce_compared_value(op, value)


class Document(FiniteDocument):
    """jsonb, as a dataclass or a tuple of them. Members of a dataclass that are None are not stored."""

    cache_ok = True

    def __init__(self, type_: Any, where: str = "a document", *, none_as_null: bool = False) -> None:
        super().__init__(where, none_as_null=none_as_null)
        self.type_ = type_
        # msgspec (0.22) would do this at the first read, and crash where two threads read at once.
        msgspec.json.Decoder(type_)

    def named(self, where: str) -> Document:
        return Document(self.type_, where, none_as_null=self.none_as_null)

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        encoded = msgspec.to_builtins(value)
        if isinstance(encoded, dict):
            encoded = {name: member for name, member in encoded.items() if member is not None}
        return super().process_bind_param(encoded, dialect)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:  # noqa: ARG002
        """Raises UnreadableDocument."""
        if value is None:
            return None
        try:
            return msgspec.convert(value, self.type_)
        except msgspec.ValidationError as error:
            raise UnreadableDocument(f"{self.where} holds a document that cannot be read: {error}") from None


def name_columns(table: Table) -> None:
    """Has the columns of a table name themselves."""
    for column in table.columns:
        where = f"{table.name}.{column.name}"
        if isinstance(column.type, FiniteDouble):
            column.type = FiniteDouble(where)
        elif isinstance(column.type, FiniteDocument):
            column.type = column.type.named(where)


def tell_refusals_as_they_are(engine: Engine) -> None:
    """Without the statement around them, and what was to be stored."""

    def unwrapped(context: ExceptionContext) -> None:
        if isinstance(context.original_exception, NotFinite):
            raise context.original_exception

    event.listen(engine, "handle_error", unwrapped)
