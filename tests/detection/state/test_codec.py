from __future__ import annotations

import zlib
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np
import pytest

from driftguard.detection import DriftClosed, DriftOpened, OtherVersion, StreamState, UnreadableState
from driftguard.detection.state.codec import MAGIC, VERSION, _State, decode_state, encode_state
from driftguard.detection.state.stream_state import OpenIncident
from driftguard.detection.statistics.turns import KEPT, LEARNED, LEVEL, OF_TURNS, STEPS, TERMS
from tests.detection.traffic import fold_all, growing_sessions, requests

HEADER = len(MAGIC) + 5


def written(columns: list[Any]) -> bytes:
    """A state of these columns."""
    body = msgspec.msgpack.encode(columns)
    return MAGIC + bytes([VERSION]) + zlib.crc32(body).to_bytes(4, "big") + body


@pytest.fixture(scope="module")
def stored() -> bytes:
    return encode_state(fold_all(requests(np.random.default_rng(1), np.full(3_000, 0.7)))[0])


def test_round_trip(stored: bytes) -> None:
    assert encode_state(decode_state(stored)) == stored
    empty = encode_state(StreamState())
    assert encode_state(decode_state(empty)) == empty


def test_evidence_that_has_lost_its_age_begins_anew(stored: bytes) -> None:
    state = decode_state(stored)
    lost = replace(
        state,
        stream_evidence=np.full_like(state.stream_evidence, 1e290),
        stream_mean_start=np.full_like(state.stream_mean_start, np.nan),
    )
    found = decode_state(encode_state(lost))
    assert not found.stream_evidence.any()
    assert not found.stream_mean_start.any()
    assert (found.stratum_evidence == state.stratum_evidence).all()


@pytest.mark.parametrize("fewer", [1, 2, 3, 4])  # onsets; and turns; and past_changes; and day_begun
def test_a_state_of_before_goes_on(stored: bytes, fewer: int) -> None:
    wire = msgspec.msgpack.decode(stored[HEADER:])
    place = _State.__struct_fields__.index("profiles")
    # Which knew of none that it had moved, nor which days had seen an hour, nor of one set aside.
    wire[place] = [profile[:-3] for profile in wire[place]]
    before = decode_state(written(wire[:-fewer]))
    assert encode_state(before) == stored


def test_which_hours_several_days_have_seen_is_found_in_a_state_of_before() -> None:
    rng = np.random.default_rng(5)
    days = requests(rng, np.full(4_000, 0.7), seconds_apart=70.0)
    state = fold_all(days)[0]
    seen = state.profiles[0].seen
    assert set(seen.ravel().tolist()) == {1, 2}  # the reference period took hours of the first whole day
    wire = msgspec.msgpack.decode(encode_state(state)[HEADER:])
    place = _State.__struct_fields__.index("profiles")
    wire[place] = [profile[:-2] for profile in wire[place]]
    before = decode_state(written(wire))
    assert (before.profiles[0].seen == seen).all()
    assert not before.profiles[0].has_aside.any()
    fold_all(requests(rng, np.full(2_000, 0.7), first_ordinal=4_001, seconds_apart=70.0), state=before)


@pytest.mark.parametrize("fewer", [1, 2, 3])  # common tests; and when each changed; and the distance
def test_an_incident_that_was_open_before_all_of_it_was_kept_goes_on(fewer: int) -> None:
    rng = np.random.default_rng(2)
    fallen = fold_all(requests(rng, np.repeat([0.8, 0.5], [3_000, 400])))[0]
    assert fallen.incidents[0] is not None
    wire = msgspec.msgpack.decode(encode_state(fallen)[HEADER:])
    place = [item.name for item in fields(StreamState)].index("incidents")
    wire[place][0] = wire[place][0][:-fewer]
    begun = written(wire)
    more = requests(rng, np.repeat([0.5, 0.8], [600, 900]), first_ordinal=3_401)
    findings = fold_all(more, state=decode_state(begun))[1]
    ended = [finding.ordinal for finding in findings if isinstance(finding, DriftClosed)]
    assert len(ended) == 1
    assert ended[0] > 4_000


def test_an_incident_of_before_whose_only_test_was_of_all_segments_together_goes_on() -> None:
    rng = np.random.default_rng(4)
    names = ["chat", "german"]
    means = np.repeat([0.8, 0.5], [3_000, 400])
    fallen = fold_all(requests(rng, means, [names[each] for each in rng.integers(0, 2, 3_400)]))[0]
    incident = fallen.incidents[0]
    assert incident is not None
    assert incident.common.tolist() == [2, 2]
    columns = {item.name: getattr(incident, item.name) for item in fields(incident)}
    columns |= {
        name: columns[name][2:] for name in ("halfway", "wealth", "seen", "last_seen", "outcome", "told")
    }
    columns |= {"test": np.zeros(2, dtype=np.int64), "halfway": np.repeat(columns["halfway"], 2)}
    before = replace(fallen, incidents=(OpenIncident(**columns), None))
    wire = msgspec.msgpack.decode(encode_state(before)[HEADER:])
    place = [item.name for item in fields(StreamState)].index("incidents")
    wire[place][0] = wire[place][0][:-1]
    segments = [names[each] for each in rng.integers(0, 2, 900)]
    more = requests(rng, np.full(900, 0.8), segments, first_ordinal=3_401)
    findings = fold_all(more, state=decode_state(written(wire)))[1]
    (ended,) = [finding for finding in findings if isinstance(finding, DriftClosed)]
    assert {change.segment for change in ended.segments} == set(names)


def test_a_state_that_knows_no_turns_yet_goes_on() -> None:
    traffic = growing_sessions(1, 2_000, falls=0.0, turns=5, open_at_once=4, between=0.05)
    state = fold_all(traffic[:1_000])[0]
    assert state.growing.any()
    stored = encode_state(state)
    columns = msgspec.msgpack.decode(stored[HEADER:])[:-2]
    joining = state.joining[:, :, :-LEVEL]
    columns[_State.__struct_fields__.index("joining")] = ["<f8", joining.shape, joining.tobytes()]
    before = decode_state(written(columns))
    assert not before.turns.any()
    assert not before.joining[:, :, -LEVEL:].any()
    assert (before.joining[:, :, :-LEVEL] == joining).all()
    after, findings = fold_all(traffic[1_000:], state=before)
    assert not any(isinstance(finding, DriftOpened) for finding in findings)
    assert after.turns[0, LEARNED].any()


def test_a_state_that_does_not_know_how_sessions_wander_goes_on() -> None:
    traffic = growing_sessions(1, 4_000, falls=0.15, turns=20, open_at_once=4, between=0.05)
    state = fold_all(traffic[:3_000])[0]
    stored = encode_state(state)
    columns = msgspec.msgpack.decode(stored[HEADER:])
    place = {name: number for number, name in enumerate(_State.__struct_fields__)}
    fewer = OF_TURNS - TERMS - 2  # the products of v with all terms, with y and with lengths
    of_before = np.ones((1, KEPT, fewer))
    assert fewer == LEVEL + STEPS * (STEPS + 1) // 2 + 2 * STEPS
    columns[place["turns"]] = ["<f8", of_before.shape, of_before.tobytes()]
    sums = np.ascontiguousarray(state.sessions.sums[:, :4])
    columns[place["sessions"]][1] = ["<f8", sums.shape, sums.tobytes()]
    before = decode_state(written(columns))
    known = before.sessions.sums
    assert (known[:, :4] == sums).all()
    assert np.allclose(known[:, 5] / known[:, 4], sums[:, 1] / sums[:, 0])
    fold_all(traffic[3_000:], state=before)


def test_another_version_is_told(stored: bytes) -> None:
    newer = MAGIC + bytes([VERSION + 1]) + stored[len(MAGIC) + 1 :]
    with pytest.raises(OtherVersion, match=rf"version {VERSION + 1}.*reads version {VERSION}"):
        decode_state(newer)


@pytest.mark.parametrize("place", [20, 300, -1])
def test_one_changed_byte_is_noticed(stored: bytes, place: int) -> None:
    damaged = bytearray(stored)
    damaged[place] ^= 1
    with pytest.raises(UnreadableState, match="damaged") as told:
        decode_state(bytes(damaged))
    assert not isinstance(told.value, OtherVersion)


@pytest.mark.parametrize("length", [0, 5, 11, 200])
def test_cut_bytes_are_refused(stored: bytes, length: int) -> None:
    with pytest.raises(UnreadableState):
        decode_state(stored[:length])


def test_damaged_bytes_of_another_version_are_damaged(stored: bytes) -> None:
    newer = MAGIC + bytes([VERSION + 1]) + stored[len(MAGIC) + 1 : -1]
    with pytest.raises(UnreadableState, match="damaged") as told:
        decode_state(newer)
    assert not isinstance(told.value, OtherVersion)
