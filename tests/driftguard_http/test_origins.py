"""Names under which a server answers, and sites whose pages may write to it."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from driftguard_http import Origins
from driftguard_http.origins import url_of

LOOPBACK = Origins("127.0.0.1", ["dg.internal"], "https://driftguard.example.com/x")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8200",
        "localhost:8200",
        "LOCALHOST",
        "[::1]:8200",
        "127.8.8.8",
        "dg.internal:80",
        "driftguard.example.com",
        "localhost.",
    ],
)
def test_a_server_on_loopback_answers_under_its_own_names(host: str) -> None:
    assert LOOPBACK.host_problem(host.encode()) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8200",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "",
        "[::",
        "0.0.0.0",
        "127.0.0.1@evil.example",
        "10.0.0.1",
        "ÿ",
    ],
)
def test_a_name_that_was_made_to_resolve_to_loopback_is_refused_by_name(host: str) -> None:
    problem = LOOPBACK.host_problem(host.encode("latin-1"))
    assert problem is not None
    assert repr(host) in problem


def test_on_another_address_any_name_may_ask_unless_names_are_given() -> None:
    assert Origins("0.0.0.0").host_problem(b"evil.example") is None
    assert Origins("0.0.0.0", ["dg.internal"]).host_problem(b"dg.internal:8200") is None
    assert Origins("0.0.0.0", ["dg.internal"]).host_problem(b"evil.example") is not None


@pytest.mark.parametrize("host", [b"10.244.0.17:8200", b"10.244.0.17", b"[fd00::17]:8200"])
def test_health_checks_and_prometheus_may_ask_by_address_whatever_names_are_given(host: bytes) -> None:
    """As those of Kubernetes, by that of the pod, which nobody knows beforehand. A page of another site comes
    by a name: what is typed in as an address is this server."""
    assert Origins("0.0.0.0", ["dg.internal"]).host_problem(host) is None
    assert Origins("10.0.0.5", ["dg.internal"]).host_problem(host) is None
    assert Origins("127.0.0.1", ["dg.internal"]).host_problem(host) is not None


@pytest.mark.parametrize(
    ("given", "host"),
    [
        ("dg.corp:8200", b"dg.corp:8200"),  # as the refusal tells it
        ("DG.corp.", b"dg.corp"),
        ("[2001:db8::5]:8200", b"[2001:db8::5]:8200"),
        ("[2001:db8::5]", b"[2001:db8::5]"),
        ("2001:db8::5", b"[2001:db8::5]:8200"),
    ],
)
def test_a_name_may_be_given_as_hosts_tell_it(given: str, host: bytes) -> None:
    own = Origins("0.0.0.0", [given])
    assert own.host_problem(host) is None
    for foreign in (b"evil.example", b"2001", b"", b"[::"):
        assert own.host_problem(foreign) is not None


@pytest.mark.parametrize(
    ("site", "origin"),
    [
        (None, None),  # curl, the client, the engine
        (b"same-origin", b"http://127.0.0.1:8200"),
        (b"none", None),
        (None, b"http://127.0.0.1:8200"),
        (None, b"https://127.0.0.1:8200"),  # TLS ended in front
        (None, b"https://driftguard.example.com"),
    ],
)
def test_its_own_pages_and_programs_may_write(site: bytes | None, origin: bytes | None) -> None:
    assert LOOPBACK.write_problem(site, origin, b"127.0.0.1:8200") is None


@pytest.mark.parametrize(
    ("external", "origin", "host"),
    [
        ("https://DriftGuard.Example.com/x", b"https://driftguard.example.com", b"127.0.0.1:8200"),
        ("http://dg.corp:80", b"http://dg.corp", b"127.0.0.1:8200"),
        ("https://dg.corp", b"https://dg.corp:443", b"127.0.0.1:8200"),
        (None, b"http://dg.corp", b"dg.corp:80"),  # as nginx passes $host:$server_port on
        (None, b"https://dg.corp", b"DG.corp:443"),
        (None, b"http://[::1]:8200", b"[::1]:8200"),
    ],
)
def test_an_origin_is_the_same_however_its_host_and_port_are_written(
    external: str | None, origin: bytes, host: bytes
) -> None:
    """Over plain HTTP browsers send no Sec-Fetch-Site: the buttons of the pages were refused."""
    assert Origins("0.0.0.0", external=external).write_problem(None, origin, host) is None
    assert Origins("0.0.0.0", external=external).write_problem(None, b"http://evil.example", host) is not None


@pytest.mark.parametrize("host", [b"dg.corp:8200", b"dg.corp:443", b"", b":80", b"dg.corp:port"])
def test_another_port_or_no_host_is_another_origin(host: bytes) -> None:
    assert Origins("0.0.0.0").write_problem(None, b"http://dg.corp", host) is not None
    assert Origins("0.0.0.0").write_problem(None, b"http://", host) is not None


@pytest.mark.parametrize(
    ("site", "origin"),
    [
        (b"cross-site", None),
        (b"same-site", b"http://127.0.0.1:8200"),  # another port of this machine is another application
        (None, b"null"),
        (None, b"http://evil.example"),
        (None, b"http://127.0.0.1:9999"),
        (None, b"http://127.0.0.1:8200.evil.example"),
        (None, b"https://driftguard.example.com.evil.example"),
        (None, b""),
        (None, b"http://["),
        (None, b"127.0.0.1:8200"),
    ],
)
def test_pages_of_other_sites_may_not(site: bytes | None, origin: bytes | None) -> None:
    assert LOOPBACK.write_problem(site, origin, b"127.0.0.1:8200") is not None


def test_the_url_of_an_ipv6_address_can_be_opened() -> None:
    assert url_of("127.0.0.1", 8200) == "http://127.0.0.1:8200"
    assert urlsplit(url_of("::1", 8200)).hostname == "::1"
    assert urlsplit(url_of("::1", 8200)).port == 8200
