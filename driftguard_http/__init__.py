"""What stands between the network and an application, for the sidecar, the engine and the proxy alike.

`Bounded` bounds what a connection may cost before there is a request, `Guard` what a request may cost
before it is routed. Knows neither of its users.
"""

from driftguard_http.connections import Bounded, ConnectionLimits, bounded_protocol
from driftguard_http.guard import Guard, KeyCheck, Refusal, Route
from driftguard_http.origins import Origins, is_loopback

__all__ = [
    "Bounded",
    "ConnectionLimits",
    "Guard",
    "KeyCheck",
    "Origins",
    "Refusal",
    "Route",
    "bounded_protocol",
    "is_loopback",
]
