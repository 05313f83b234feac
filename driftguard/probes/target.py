"""Which servers are probed, and at which address: what the settings say of probes, else what they know of
engines, the proxy's upstream and scraped servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from pydantic import ValidationError

from driftguard.errors import BadSettings
from driftguard.settings import ProbeTargetSettings, Settings, SourceSettings

# Below these paths the server's own root is known; any other may be one of a gateway to several servers.
_OWN_PATHS: Final = ("", "metrics", "prometheus/metrics")


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """`is_given`: the settings name it as one to probe. Any other is asked only where its list of models
    shows an engine whose answers tell counts: it may be an exporter of metrics, or be paid by the token."""

    asked: ProbeTargetSettings
    is_given: bool = True

    @property
    def server(self) -> str:
        return self.asked.server


def targets_of(settings: Settings) -> Sequence[ProbeTarget]:
    """Those that are probed without being asked for, one for each server; none where probes are off."""
    if not settings.probes.enabled:
        return ()
    found: dict[str, ProbeTarget] = {}
    for target in _known(settings):
        found.setdefault(target.server, target)
    return tuple(found.values())


def _known(settings: Settings) -> Iterator[ProbeTarget]:
    yield from map(ProbeTarget, settings.probes.targets)
    for engine in settings.engines:
        if engine.admin_url is not None:
            asked = ProbeTargetSettings(server=engine.server, url=engine.admin_url, api_key=engine.api_key)
            yield ProbeTarget(asked, is_given=False)
    proxy = settings.proxy
    if proxy.upstream is not None and proxy.method != "none":
        asked = ProbeTargetSettings.model_construct(  # what is no address only the proxy itself refuses
            server=proxy.server or urlsplit(proxy.upstream).netloc.rpartition("@")[2],
            url=proxy.upstream,
            engine=proxy.engine,
            api_key=proxy.upstream_api_key,
        )
        yield ProbeTarget(asked, is_given=False)
    for source in settings.sources:
        if (found := _of_source(source)) is not None:
            yield ProbeTarget(found, is_given=False)


def _of_source(source: SourceSettings) -> ProbeTargetSettings | None:
    parts = urlsplit(source.url)
    if parts.path.strip("/") not in _OWN_PATHS or parts.query:
        return None
    return ProbeTargetSettings(
        server=source.server or parts.netloc.rpartition("@")[2],
        url=urlunsplit((parts.scheme, parts.netloc, "", "", "")),
        api_key=source.api_key,
    )


def target_of(settings: Settings, server: str, url: str | None) -> ProbeTargetSettings:
    """`url`, else probes.targets, else what else is known of the server. Raises BadSettings."""
    known = next((target.asked for target in _known(settings) if target.server == server), None)
    if url is not None:
        named = next((target for target in settings.probes.targets if target.server == server), None)
        given = _at(server, url)
        return named.model_copy(update={"url": given.url}) if named else given
    if known is None:
        raise BadSettings(
            f"probes.targets: none is for {server!r}, and no engine, proxy or source of these settings has "
            "that name; name the sidecar's file with --config, add [[probes.targets]] or give --url"
        )
    return known


def _at(server: str, url: str) -> ProbeTargetSettings:
    try:
        return ProbeTargetSettings(server=server, url=url)
    except ValidationError:
        raise BadSettings(
            "--url: does not begin with http:// or https:// and a host, or its host or port cannot be read"
        ) from None
