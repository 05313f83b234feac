"""`make image-check`: builds the sidecar's image from the Dockerfile, measures it, runs it as its users do.

The base is what the Dockerfile's FROM names where a registry of images can be reached. Elsewhere Debian of
the same release with this machine's Python of the same version stands in for it, and the output says so. All
is kept in DRIFTGUARD_CACHE_DIR (~/.cache/driftguard), under image/: unchanged files are not built again. The
container has a read-only root, no capability, no network but loopback, and a PostgreSQL of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from driftguard.records import encode_record
from driftguard.store.embedded import start_embedded
from tests.conftest import server_directory
from tests.deploy.committed import ROOT
from tests.store.samples import make_records

LIMIT_MB: Final = 300.0  # uncompressed, with the base
PROGRAMS: Final = ("buildah", "debootstrap", "ip", "setpriv", "strip", "unshare")
CACHE: Final = Path(os.environ.get("DRIFTGUARD_CACHE_DIR") or Path.home() / ".cache" / "driftguard") / "image"
IMAGE: Final = "driftguard-sidecar:check"
INSIDE: Final = "--inside"
SOCKET: Final = ".s.PGSQL.5432"
CERTIFICATES: Final = "/etc/ssl/certs/ca-certificates.crt"  # Debian's place
LIBRARIES: Final = (  # those of the FROM image
    "ca-certificates,libbz2-1.0,libffi8,liblzma5,libncursesw6,libreadline8,libsqlite3-0,libssl3,libuuid1,netbase,"
    "tzdata,zlib1g"
)
NOT_IN_BASE: Final = ("usr/share/doc", "usr/share/info", "usr/share/locale", "usr/share/man", "var/cache/apt")
ADDED: Final = re.compile(  # all that may lie in the image and not in its base
    r"opt/driftguard/.*|etc/(passwd|group|shadow|gshadow|subuid|subgid)-?|var/log/(lastlog|faillog)|"
    r"var/lib/driftguard/\.(bash_logout|bashrc|profile)"
)
TOOL: Final = re.compile(
    r".*/(pip|setuptools|wheel)(-[^/]*)?/.*|.*/(tests|__pycache__)/.*|.*\.(pyi|pxd|h|c|a)"
)


class CheckFailed(Exception):
    """What the image does not do; the message is for the person who ran the check."""


def main() -> None:
    if os.geteuid() != 0:
        sys.exit("image-check needs root, to build an image and to make its root read-only")
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        install = "apt-get install buildah debootstrap binutils iproute2"
        sys.exit(f"make image-check needs {', '.join(missing)}: {install}")
    try:
        if sys.argv[1:2] == [INSIDE]:
            with server_directory() as directory, start_embedded(directory) as url:
                check_running(Container(Path(sys.argv[2]), directory, url))
        else:
            check()
    except CheckFailed as error:
        sys.exit(f"image-check: {error}")


def check() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    name = re.findall(r"^FROM (\S+:\S+)", dockerfile, re.MULTILINE)[0]
    base = make_base(name)
    build()
    print(f"Built in {time.monotonic() - started:.0f} s on {base}", flush=True)
    with mounted(name) as below, mounted(IMAGE) as root:
        check_files(below, root)
        inside = [sys.executable, "-m", "tests.deploy.image_check", INSIDE, str(root)]
        if subprocess.run(["unshare", "--mount", "--net", *inside], check=False).returncode != 0:
            raise CheckFailed("the container does not do what it should, see above")


def buildah(*arguments: str, log: Any = None) -> str:
    """What it printed; where there is a log, all goes there. Raises CalledProcessError."""
    command = ["buildah", "--root", str(CACHE / "storage"), "--runroot", str(CACHE / "run"), *arguments]
    ran = subprocess.run(command, check=True, stdout=log or subprocess.PIPE, stderr=log, text=True)
    return (ran.stdout or "").strip()


def make_base(name: str) -> str:
    """Makes the image that FROM names, once, and returns a sentence on what it is."""
    note = CACHE / "base.txt"
    if note.exists() and buildah("images", "--quiet", "--filter", f"reference={name}"):
        return note.read_text(encoding="utf-8")
    try:
        source = f"docker.io/library/{name}"
        buildah("pull", source, log=subprocess.DEVNULL)
        buildah("tag", source, name)
        made = name
    except subprocess.CalledProcessError:
        made = stand_in(name)
    note.write_text(made, encoding="utf-8")
    return made


def stand_in(name: str) -> str:
    version, release = re.fullmatch(r"python:(\d+\.\d+)-slim-(\w+)", name).groups()  # type: ignore[union-attr]
    print(f"No registry of images has {name} for this machine: making a stand-in")
    directory = CACHE / "base"
    shutil.rmtree(directory, ignore_errors=True)
    with (CACHE / "debootstrap.log").open("w") as log:
        subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={LIBRARIES}", release, str(directory)],
            check=True,
            stdout=log,
        )
    for unneeded in NOT_IN_BASE:
        shutil.rmtree(directory / unneeded)
    for path in (directory / "var/lib/apt/lists").iterdir():
        path.unlink() if path.is_file() else shutil.rmtree(path)
    full = copy_python(version, directory)
    container = buildah("from", "scratch")
    subprocess.run(
        ["cp", "--archive", f"{directory}/.", buildah("mount", container)], check=True
    )  # with devices
    search = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    buildah("config", "--env", f"PATH={search}", "--env", "LANG=C.UTF-8", container)
    buildah("commit", "--rm", container, name)
    shutil.rmtree(directory)
    return f"Debian {release} with Python {full} of this machine, standing in for {name}"


def copy_python(version: str, directory: Path) -> str:
    """This machine's Python of that version, without its packages, to usr/local; returns the full version."""
    ask = "import platform, sys; print(sys.base_prefix, platform.python_version())"
    try:
        # pyenv starts the version that is named there; others do not read it
        answer = subprocess.check_output(
            [f"python{version}", "-c", ask], text=True, env={**os.environ, "PYENV_VERSION": version}
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise CheckFailed(f"a stand-in needs python{version} on the PATH: {error}") from None
    prefix, full = answer.split()
    ignored = shutil.ignore_patterns("site-packages", "test", "tests", "idle_test", "__pycache__", "*.a")
    local = directory / "usr" / "local"
    shutil.copytree(
        Path(prefix, "lib", f"python{version}"),
        local / "lib" / f"python{version}",
        ignore=ignored,
        symlinks=True,
    )
    for file in Path(prefix, "lib").glob(f"libpython{version}.so*"):
        shutil.copy2(file, local / "lib", follow_symlinks=False)
    shutil.copy2(Path(prefix, "bin", f"python{version}"), local / "bin")
    for link in ("python", "python3"):
        (local / "bin" / link).symlink_to(f"python{version}")
    libraries = [file for file in (local / "lib").rglob("*.so*") if not file.is_symlink()]
    subprocess.run(["strip", "--strip-unneeded", *libraries], check=True)
    chroot = ["chroot", str(directory)]
    subprocess.run([*chroot, "ldconfig"], check=True)
    subprocess.run([*chroot, "python3", "-B", "-m", "ensurepip"], check=True, stdout=subprocess.DEVNULL)
    (local / "bin" / "pip").symlink_to("pip3")
    for cache in (local / "lib").rglob("__pycache__"):
        shutil.rmtree(cache)
    return full


def build() -> None:
    """With this machine's way to the package index, mounted: the image does not know of it."""
    configuration = CACHE / "pip.conf"
    configuration.write_text(pip_configuration(), encoding="utf-8")
    options = ["--layers", "--format=docker", "--isolation=chroot", "--network=host", "--pull-never"]
    mounts = [f"--volume={configuration}:/etc/pip.conf:ro"]
    if Path(CERTIFICATES).exists():
        mounts.append(f"--volume={CERTIFICATES}:{CERTIFICATES}:ro")
    with (CACHE / "build.log").open("w") as log:
        try:
            buildah(
                "build",
                *options,
                *mounts,
                "--target=sidecar",
                f"--tag={IMAGE}",
                str(ROOT),
                log=log,
            )
        except subprocess.CalledProcessError:
            tail = "\n".join((CACHE / "build.log").read_text(encoding="utf-8").splitlines()[-30:])
            sys.exit(f"{tail}\nimage-check: the build failed; all of its output is in {CACHE / 'build.log'}")


def pip_configuration() -> str:
    """Of this machine, but what names files and folders of it."""
    printed = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True)
    values = re.findall(r"^(?:global|install|:env:)\.(\S+)='(.*)'$", printed, re.MULTILINE)
    kept = {key.lstrip("."): value for key, value in values}
    lines = [
        f"{key} = {value}"
        for key, value in kept.items()
        if key in ("index-url", "extra-index-url", "trusted-host", "timeout", "retries", "default-timeout")
        and not re.search(r"(^|\s|\\n)(file:|/)", value)
    ]
    return "\n".join(["[global]", f"cert = {CERTIFICATES}", *lines, ""])


@contextmanager
def mounted(image: str) -> Iterator[Path]:
    container = buildah("from", "--pull-never", image)
    try:
        yield Path(buildah("mount", container))
    finally:
        buildah("rm", container)


def files(root: Path) -> dict[str, tuple[int, int]]:
    """Path below the root -> bytes and time of its last change, of files that are no links."""
    found = {}
    for directory, _, names in os.walk(root):
        for name in names:
            path = Path(directory, name)
            if path.is_file() and not path.is_symlink():
                stat = path.stat()
                found[str(path.relative_to(root))] = (stat.st_size, int(stat.st_mtime))
    return found


def check_files(below: Path, root: Path) -> None:
    """What the image adds to its base, and how large it is. Raises CheckFailed."""
    base, image = files(below), files(root)
    added = {path: size for path, (size, changed) in image.items() if base.get(path) != (size, changed)}
    total, own = sum(size for size, _ in image.values()) / 1e6, sum(added.values()) / 1e6
    parts = Counter[str]()
    for path, size in added.items():
        within = re.sub(r"^opt/driftguard/(lib/python[^/]*/site-packages/)?", "", path)
        parts[within.split("/")[0]] += size
    print(f"Size, uncompressed: {total:.1f} MB: {own:.1f} added, {total - own:.1f} left of the base")
    print("  " + ", ".join(f"{name} {size / 1e6:.1f}" for name, size in parts.most_common(12)))
    if added.get("etc/pip.conf") == 0:
        del added["etc/pip.conf"]  # where build() mounted it
    if strange := sorted(path for path in added if not ADDED.fullmatch(path)):
        raise CheckFailed(f"the image adds what is not DriftGuard's: {', '.join(strange[:10])}")
    packages = [
        path for path in added if not path.startswith("opt/driftguard/lib/") or "/driftguard" not in path
    ]
    if tools := sorted(path for path in packages if TOOL.fullmatch(path)):
        raise CheckFailed(f"left in the image: {', '.join(tools[:10])}")
    if total > LIMIT_MB:
        raise CheckFailed(f"the image has {total:.1f} MB, {LIMIT_MB:.0f} is the limit")


@dataclass(frozen=True, slots=True)
class Container:
    """The image's file system, read-only, in the mount and network namespaces of this process."""

    root: Path
    directory: Path  # of the database's server, and of the volume
    database_url: str

    @property
    def configuration(self) -> dict[str, Any]:
        return dict(json.loads(buildah("inspect", "--type=image", IMAGE))["Docker"]["config"])

    def prepare(self, user: int) -> None:
        volume = self.directory / "volume"
        volume.mkdir()
        os.chown(volume, user, user)
        socket = Path(httpx.URL(self.database_url).params["host"], SOCKET)
        bound = self.directory / "run" / SOCKET  # the server's own directory is closed to other users
        bound.parent.mkdir()
        bound.touch()
        self.directory.chmod(0o755)
        root = str(self.root)
        for arguments in (
            ["--bind", root, root],
            ["-o", "remount,bind,ro", root],
            ["--bind", str(volume), f"{root}/var/lib/driftguard"],
            ["--bind", str(socket), str(bound)],
            ["--rbind", str(bound.parent), f"{root}/run"],
            ["-t", "tmpfs", "tmpfs", f"{root}/tmp"],
            ["--rbind", "/dev", f"{root}/dev"],
            ["--rbind", "/proc", f"{root}/proc"],
        ):
            subprocess.run(["mount", *arguments], check=True)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

    def start(self, command: Sequence[str], **variables: str) -> subprocess.Popen[str]:
        user = self.configuration["User"].split(":")
        locked = ["--clear-groups", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
        environment = dict(value.split("=", 1) for value in self.configuration["Env"])
        environment |= {"DRIFTGUARD_DATABASE_URL": re.sub(r"host=[^&]*", "host=/run", self.database_url)}
        become = ["setpriv", f"--reuid={user[0]}", f"--regid={user[1]}", *locked]
        return subprocess.Popen(
            ["chroot", str(self.root), *become, *command],
            env=environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: Sequence[str], **variables: str) -> tuple[int, str]:
        """Exit code and output."""
        process = self.start(command, **variables)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output


def check_running(container: Container) -> None:
    """Raises CheckFailed."""
    image = container.configuration
    container.prepare(int(image["User"].split(":")[0]))
    key = "0123456789" * 4
    entry, health = image["Entrypoint"], image["Healthcheck"]["Test"][1:]

    def must(what: str, command: Sequence[str], *, fail: bool = False, **variables: str) -> str:
        code, output = container.run(command, **variables)
        if (code == 0) is fail:
            raise CheckFailed(f"{what}: exit code {code}\n{output}")
        print(f"  {what}")
        return output

    must(
        "its root is read-only, also where its user owns it",
        ["touch", "/var/lib/driftguard-rules/x"],
        fail=True,
    )
    seen = must("compiled modules are taken", ["python", "-v", "-c", "import driftguard.app"])
    if again := re.findall(r"code object from '(/opt/driftguard/\S*/driftguard/\S*\.py)'", seen):
        raise CheckFailed(f"compiled at every start, as their caches are not taken: {', '.join(again[:5])}")
    must("tables are made: driftguard db upgrade", [*entry, "db", "upgrade"])
    must("a key is stored: driftguard keys add", [*entry, "keys", "add", "check"], DRIFTGUARD_API_KEY=key)
    started = time.monotonic()
    server = container.start([*entry, *image["Cmd"]])
    try:
        check_serving(server, key, started)
        must("HEALTHCHECK succeeds", health)
    finally:
        server.send_signal(signal.SIGTERM)
        output, _ = server.communicate(timeout=60)
    if server.returncode != 0 or "Traceback" in output:
        raise CheckFailed(f"the sidecar ended with exit code {server.returncode}\n{output}")
    must("HEALTHCHECK fails once the sidecar has ended, in order", health, fail=True)


def check_serving(server: subprocess.Popen[str], key: str, started: float) -> None:
    with httpx.Client(base_url="http://127.0.0.1:8200", timeout=60) as client:
        wait_for("/readyz", client, server, lambda answer: answer.is_success)
        user, seconds = Path(f"/proc/{server.pid}").stat().st_uid, time.monotonic() - started
        print(f"  serves as user {user}, ready in {seconds:.1f} s")
        sent = b"\n".join(map(encode_record, make_records(2000, segments=1)))
        answer = client.post("/api/v1/records", content=sent, headers={"Authorization": f"Bearer {key}"})
        answer.raise_for_status()
        wait_for("/api/v1/status", client, server, lambda answer: '"verdict":"steady"' in answer.text)
        print("  2,000 records are stored, and the detector finds them steady")
        wait_for("/", client, server, lambda answer: "<title>" in answer.text)
        print("  the page of the fleet is served")


def wait_for(path: str, client: httpx.Client, server: subprocess.Popen[str], holds: Any) -> None:
    deadline, text = time.monotonic() + 60, "no answer"
    while time.monotonic() < deadline and server.poll() is None:
        try:
            answer = client.get(path)
        except httpx.TransportError:
            pass
        else:
            if holds(answer):
                return
            text = answer.text
        time.sleep(0.2)
    raise CheckFailed(f"{path}: {text[:2000]}")


if __name__ == "__main__":
    main()
