"""What is put on the bets that begin at a request.

A stream may begin one bet per request. Of C segments that are watched each is given 1 / C of it, and puts
what it was given on its next request: w_t = g_t / C, where g_t counts the drafted requests of the stream
since the one at which the segment last began bets. All segments thus begin equally much. With one bet per
request of its own, a segment of a tenth of the traffic would cause a tenth of the false alarms, and pay for
that with a longer delay.

Invariant: the w of all requests up to t add up to t at most, whatever the mix does; w_t is known before x is.
It holds across a change of C because all begin anew then (`begun_anew`): what was given before is lost.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.state.stream_state import Floats, Ints, StreamState


def put_on_bets(group: NDArray[np.integer[Any]], clock: Ints, begun: Ints, segments: Ints | int) -> Floats:
    """w of each of W requests.

    `group` [W] is whose segment each request is of, `clock` [W] how many drafted requests its stream has
    had up to it, `begun` that count when the segment last began bets, `segments` ([W], or one for all) C.
    """
    order = np.argsort(group, kind="stable")
    previous = np.empty_like(clock)
    previous[order[1:]] = clock[order[:-1]]
    first = order[np.flatnonzero(np.diff(group[order].astype(np.int64), prepend=-1))]
    previous[first] = begun[group[first]]
    share: Floats = (clock - previous) / np.maximum(segments, 1)
    return share


def watched_segments(state: StreamState) -> NDArray[np.bool_]:
    """Which segments [S] have a stratum with a baseline."""
    return watched_among(len(state.names), state.segment_of_stratum, state.ready)


def watched_among(
    segments: int, segment_of_stratum: NDArray[np.integer[Any]], ready: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """The same of segments and strata [C] that need not be of one stream."""
    watched = np.zeros(segments, dtype=np.bool_)
    watched[segment_of_stratum[ready]] = True
    return watched


def restart_bets(state: StreamState) -> StreamState:
    """The state in which all watched segments begin bets from now on."""
    now = int(state.drafted_requests.sum())
    return replace(state, begun=np.where(watched_segments(state), now, 0))
