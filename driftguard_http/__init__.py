"""The layer between the network and an application, shared by the sidecar, the engine and the proxy.

`Bounded` limits the cost of a connection before there is a request, `Guard` the cost of a request before it
is routed. Imports none of the three.
"""

from driftguard_http.connections import Bounded, ConnectionLimits, bounded_protocol
from driftguard_http.guard import Guard, KeyCheck, Refusal, Route
from driftguard_http.origins import Origins, is_forwarded, is_loopback
from driftguard_http.room import Room

__all__ = [
    "Bounded",
    "ConnectionLimits",
    "Guard",
    "KeyCheck",
    "Origins",
    "Refusal",
    "Room",
    "Route",
    "bounded_protocol",
    "is_forwarded",
    "is_loopback",
]
