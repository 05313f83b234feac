"""Sends acceptance records from a serving process, and reads the sidecar's status and incidents.

    from driftguard.client import Client

    with Client("http://127.0.0.1:8200") as client:
        client.send(record)               # returns at once, never raises, never blocks
        print(client.status().streams[0].text)

`AsyncClient` is the same for asyncio. `send` puts the record into a bounded buffer, from which it is sent in
batches, repeatedly until the sidecar has acknowledged it. A record_id is stored once, however often it is
sent. When the buffer is full because the sidecar is unreachable, the oldest record is dropped and counted
(`counts.dropped`). A record that the sidecar refuses is logged with the reason and counted
(`counts.refused`); `post` sends some records now and raises instead.
Requests that were answered and of which the caller cannot make a record are counted by `count_unrecorded`.

Imports only the record's definition and the errors from the sidecar.
"""

from driftguard.client.aio import AsyncClient
from driftguard.client.answers import BatchCounts, Incident, SegmentStatus, Status, StreamStatus
from driftguard.client.buffer import Counts
from driftguard.client.protocol import RefusedRecords, SidecarUnavailable
from driftguard.client.sync import Client

__all__ = [
    "AsyncClient",
    "BatchCounts",
    "Client",
    "Counts",
    "Incident",
    "RefusedRecords",
    "SegmentStatus",
    "SidecarUnavailable",
    "Status",
    "StreamStatus",
]
