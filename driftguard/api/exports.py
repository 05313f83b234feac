"""Rows as JSON Lines, CSV or Parquet, page by page: an export of any length takes the memory of one page."""

from __future__ import annotations

import csv
import io
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from driftguard.api.problems import MissingExtra
from driftguard.errors import Busy

if TYPE_CHECKING:
    import pyarrow as pa

Format = Literal["jsonl", "csv", "parquet"]
MEDIA_TYPES: Final[dict[Format, str]] = {
    "jsonl": "application/x-ndjson",
    "csv": "text/csv",
    "parquet": "application/vnd.apache.parquet",
}
BUSY_SECONDS: Final = 10  # after which the client may try again
Page = Sequence[msgspec.Struct]
_encode = msgspec.json.Encoder().encode


class ExportSlots:
    """Limits how many exports run at once: each holds a page of rows until its reader has read it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._free = threading.Semaphore(most)

    def take(self) -> ExportSlot:
        """Raises ExportsBusy."""
        if not self._free.acquire(blocking=False):
            raise ExportsBusy(
                f"{self._most} exports run already, and http.max_exports is {self._most}",
                retry_after_seconds=BUSY_SECONDS,
            )
        return ExportSlot(self._free)


class ExportSlot:
    """Is free again when given back or garbage-collected: an answer never begins if its client has
    disconnected."""

    def __init__(self, free: threading.Semaphore) -> None:
        self.give_back = weakref.finalize(self, free.release)


class ExportsBusy(Busy):
    """{most} exports run already, and http.max_exports is {most}"""

    status = 503
    title = "Too many exports"


class ExportResponse(StreamingResponse):
    """Gives its slot back when it has ended, also by an error."""

    def __init__(self, slot: ExportSlot, content: Iterator[bytes], **more: Any) -> None:
        super().__init__(content, **more)
        self._slot = slot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._slot.give_back()


def exporting(slots: ExportSlots, pages: Callable[[], Iterator[bytes]], **more: Any) -> ExportResponse:
    """`pages` reads the first page at once, so that a failure of the database becomes an error status before
    the answer begins. Raises ExportsBusy, and what `pages` raises."""
    return ExportResponse(slots.take(), pages(), **more)


def encoder(format_: Format, row: type[msgspec.Struct]) -> Callable[[Iterator[Page]], Iterator[bytes]]:
    """A function from pages of `row` to a file's bytes. Raises MissingExtra for Parquet without pyarrow."""
    if format_ == "jsonl":
        return json_lines
    if format_ == "csv":
        return lambda pages: csv_lines(pages, row)
    if find_spec("pyarrow") is None:
        raise MissingExtra(
            "format: parquet needs pyarrow; beside the sidecar: pip install 'driftguard-llm[parquet]'",
            field="format",
        )
    return lambda pages: parquet(pages, row)


def json_lines(pages: Iterator[Page]) -> Iterator[bytes]:
    for page in pages:
        yield b"".join(_encode(row) + b"\n" for row in page)


def csv_lines(pages: Iterator[Page], row: type[msgspec.Struct]) -> Iterator[bytes]:
    """A header, then one line per row (RFC 4180). Null is written as empty; a list as a JSON array."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(row.__struct_fields__)
    for page in pages:
        for item in page:
            writer.writerow([_cell(value) for value in msgspec.to_builtins(item).values()])
        yield text.getvalue().encode()
        text.seek(0)
        text.truncate()
    yield text.getvalue().encode()


def _cell(value: object) -> object:
    return json.dumps(value) if isinstance(value, list) else value


def parquet(pages: Iterator[Page], row: type[msgspec.Struct]) -> Iterator[bytes]:
    """One row group per page. UUIDs are text, times are UTC in microseconds."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = arrow_schema(row)
    written = _Written()
    with pq.ParquetWriter(written, schema, compression="zstd") as writer:
        for page in pages:
            items = [msgspec.to_builtins(item, builtin_types=(datetime,)) for item in page]
            writer.write_table(pa.Table.from_pylist(items, schema))
            yield written.take()
    yield written.take()


def arrow_schema(row: type[msgspec.Struct]) -> pa.Schema:
    """A column per field, in their order; only what may be null is nullable."""
    import pyarrow as pa

    info = msgspec.inspect.type_info(row)
    assert isinstance(info, msgspec.inspect.StructType)  # noqa: S101 (row is a struct)
    return pa.schema([_column(field.name, field.type) for field in info.fields])


def _column(name: str, kind: msgspec.inspect.Type) -> pa.Field:
    import pyarrow as pa

    if isinstance(kind, msgspec.inspect.UnionType):
        (given,) = (part for part in kind.types if not isinstance(part, msgspec.inspect.NoneType))
        return pa.field(name, _arrow_type(given), nullable=True)
    return pa.field(name, _arrow_type(kind), nullable=False)


def _arrow_type(kind: msgspec.inspect.Type) -> pa.DataType:
    import pyarrow as pa

    match kind:
        case msgspec.inspect.Metadata(type=inner):
            return _arrow_type(inner)
        case msgspec.inspect.IntType():
            return pa.int64()
        case msgspec.inspect.FloatType():
            return pa.float64()
        case msgspec.inspect.DateTimeType():
            return pa.timestamp("us", tz="UTC")
        case msgspec.inspect.ListType(item_type=inner):
            return pa.list_(_arrow_type(inner))
        case _:
            return pa.string()


class _Written(io.RawIOBase):
    """Keeps written bytes until they are taken; its position continues to count."""

    def __init__(self) -> None:
        self._parts = bytearray()
        self._position = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:
        part = bytes(data)
        self._parts += part
        self._position += len(part)
        return len(part)

    def take(self) -> bytes:
        taken = bytes(self._parts)
        self._parts.clear()
        return taken
