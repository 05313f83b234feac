"""The address at which a server is probed: from the command line, else from the settings."""

from __future__ import annotations

from driftguard.errors import BadSettings
from driftguard.settings import ProbeTargetSettings, Settings


def target_of(settings: Settings, server: str, url: str | None) -> ProbeTargetSettings:
    """`url`, else probes.targets, else the built-in engine in engines. Raises BadSettings."""
    known = next((target for target in settings.probes.targets if target.server == server), None)
    if url is not None:
        return (
            known.model_copy(update={"url": url})
            if known
            else ProbeTargetSettings.model_validate({"server": server, "url": url})
        )
    if known is not None:
        return known
    for engine in settings.engines:
        if engine.server == server and engine.admin_url is not None:
            return ProbeTargetSettings(
                server=server, url=engine.admin_url, model=None, api_key=engine.api_key
            )
    raise BadSettings(
        f"probes.targets: none is for {server!r}, and no engine has that name; "
        "add [[probes.targets]] or give --url"
    )
