"""The manifests: valid for Kubernetes, locked down; their commands, settings, ports and names are ours."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from driftguard.alerting.rules.generate import kubernetes_manifest
from driftguard.proxy.app import FLUSH_SECONDS
from driftguard.settings import ProxySettings, Settings
from driftguard.settings.loading import load_settings
from tests.alerts.committed import COMMITTED, RULES, load
from tests.deploy.committed import (
    KUBERNETES,
    VERSION,
    commands_of_shell,
    documents,
    manifests,
    parse_command,
    set_environment,
    tool,
)
from tests.deploy.test_dockerfile import last

KUBERNETES_VERSION = "1.31"
KUBECTL = tool("kubectl")
PORTS = {"driftguard-sidecar": 8200, "driftguard-engine": 8100}
PROXY_PORTS = {"api": 8300, "admin": 8301}
OBJECTS = list(manifests())
NATIVE = [(file, found) for file, found in OBJECTS if "monitoring.coreos.com" not in found["apiVersion"]]


def name_of(value: Any) -> str:
    return (
        f"{value['kind']}-{value['metadata']['name']}" if isinstance(value, dict) and "kind" in value else ""
    )


def pod_of(manifest: dict[str, Any]) -> dict[str, Any] | None:
    spec = manifest["spec"]
    if manifest["kind"] == "CronJob":
        spec = spec["jobTemplate"]["spec"]
    pod: dict[str, Any] | None = spec.get("template", {}).get("spec")
    return pod


def pods() -> Iterator[tuple[Path, dict[str, Any], dict[str, Any]]]:
    for file, manifest in NATIVE:
        pod = pod_of(manifest)
        if pod is not None:
            yield file, manifest, pod


PODS = list(pods())
OURS = [
    pytest.param(file, pod, container, id=f"{name_of(manifest)}-{container['name']}")
    for file, manifest, pod in PODS
    for container in [*pod.get("initContainers", []), *pod["containers"]]
    if container["image"] in PORTS
]


def commands(container: dict[str, Any]) -> list[list[str]]:
    if "command" in container:
        shell, option, script = container["command"]
        assert (shell, option) == ("sh", "-c")
        return commands_of_shell(script)
    return [container["args"]]


def is_proxy(container: dict[str, Any]) -> bool:
    return bool(container["image"] in PORTS and container.get("args", [""])[0] == "proxy")


def environment(container: dict[str, Any]) -> dict[str, str]:
    """As Kubernetes sets it: $(NAME) stands for a variable above."""
    known: dict[str, str] = {}
    for variable in container.get("env", []):
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            assert source["secretKeyRef"]["name"] == "driftguard"
            key = source["secretKeyRef"]["key"]
            known[variable["name"]] = {"database-url": "postgresql://u:p@db/d", "api-key": "k" * 64}[key]
        elif "fieldRef" in source:
            known[variable["name"]] = "chat-0"
        else:
            known[variable["name"]] = re.sub(
                r"\$\((\w+)\)", lambda found: known[found[1]], str(variable["value"])
            )
    return known


@pytest.mark.parametrize(("file", "manifest"), NATIVE, ids=name_of)
def test_kubernetes_would_take_it(file: Path, manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize(("file", "pod", "container"), OURS)
def test_our_containers_are_locked_down(file: Path, pod: dict[str, Any], container: dict[str, Any]) -> None:
    security = {**pod.get("securityContext", {}), **container["securityContext"]}
    assert security["runAsNonRoot"]
    assert security["runAsUser"] == 10001
    assert f"{security['runAsUser']}:{security['runAsGroup']}" == last("sidecar", "USER")
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    assert "memory" in container["resources"]["limits"]
    assert not pod["automountServiceAccountToken"]


@pytest.mark.parametrize(("file", "pod", "container"), OURS)
def test_what_is_written_to_is_a_volume(file: Path, pod: dict[str, Any], container: dict[str, Any]) -> None:
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    written = {"/tmp"} if is_proxy(container) else {"/tmp", "/var/lib/driftguard"}
    assert written <= mounted.keys()
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(mounted.values()) <= volumes.keys()
    if not is_proxy(container) and "emptyDir" in volumes[mounted["/var/lib/driftguard"]]:
        # `driftguard doctor` finds fault with a data directory into which every user may write.
        assert environment(container)["DRIFTGUARD_DATA_DIR"].startswith("/var/lib/driftguard/")


@pytest.mark.parametrize(("file", "pod", "container"), OURS)
def test_commands_and_settings_are_ours(
    file: Path, pod: dict[str, Any], container: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = commands(container)
    assert found
    for command in found:
        parse_command(command)
    variables = environment(container)
    settings = settings_of(monkeypatch, variables)
    assert {engine.admin_url for engine in settings.engines} <= {"http://engine:8100"}
    assert {source.server for source in settings.sources} <= {"chat-0"}


def nightly(directory: Path, *lines: str) -> subprocess.Popen[bytes]:
    """The command of the CronJob, with these lines for `driftguard`; it has begun."""
    program = directory / "driftguard"
    program.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    program.chmod(0o755)
    (container,) = [one for _, _, pod in PODS for one in pod["containers"] if one["name"] == "retrain"]
    return subprocess.Popen(
        container["command"], env={"PATH": f"{directory}:{os.defpath}"}, stdout=subprocess.PIPE
    )


@pytest.mark.parametrize(("code", "told"), [(0, 0), (3, 0), (4, 0), (1, 1), (2, 2)])
def test_the_nightly_job_tells_how_its_command_ended(tmp_path: Path, code: int, told: int) -> None:
    with nightly(tmp_path, f"exit {code}") as process:
        assert process.wait(60) == told


def test_the_nightly_job_ends_its_command_with_the_pod(tmp_path: Path) -> None:
    """Which removes its copies of captured requests then."""
    lines = ["trap 'echo ended; exit 1' TERM", "echo begun", "for _ in 1 2 3 4 5 6 7 8 9; do sleep 0.2; done"]
    with nightly(tmp_path, *lines) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == b"ended\n"
        assert process.wait(60) == 1


def settings_of(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> Settings:
    set_environment(monkeypatch, variables)
    if variables.get("DRIFTGUARD_CONFIG") is None:
        return load_settings()
    assert variables["DRIFTGUARD_CONFIG"] == "/etc/driftguard/driftguard.toml"
    monkeypatch.delenv("DRIFTGUARD_CONFIG")
    return load_settings(KUBERNETES / "base" / "driftguard.toml")


@pytest.mark.parametrize(("file", "manifest", "pod"), PODS, ids=name_of)
def test_the_environment_is_not_that_of_services(
    file: Path, manifest: dict[str, Any], pod: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Service named driftguard would set DRIFTGUARD_PORT, which is a setting, to tcp://..."""
    assert pod["enableServiceLinks"] is False


def test_ports_and_probes_are_what_the_images_listen_to() -> None:
    for _, _, pod in PODS:
        for container in pod["containers"]:
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
            if container["image"] in PORTS and ports:
                own = PROXY_PORTS if is_proxy(container) else {"http": PORTS[container["image"]]}
                assert ports == own
            asked = [container[kind]["httpGet"] for kind in container if kind.endswith("Probe")]
            assert {probe["port"] for probe in asked} <= ports.keys()
            if is_proxy(container):
                assert [(probe["port"], probe["path"]) for probe in asked] == [
                    ("admin", "/driftguard/healthz")
                ] * 2
            elif container["image"] == "driftguard-sidecar":
                assert {probe["path"] for probe in asked} <= {"/healthz", "/readyz"}
            else:
                assert {probe["path"] for probe in asked} <= {"/health"}


def test_services_select_pods_that_have_the_port() -> None:
    labelled = [
        (manifest["spec"]["template"]["metadata"]["labels"], pod)
        for _, manifest, pod in PODS
        if manifest["kind"] != "CronJob"
    ]
    for _, service in NATIVE:
        if service["kind"] != "Service":
            continue
        (pod,) = [pod for labels, pod in labelled if service["spec"]["selector"].items() <= labels.items()]
        offered = {
            port["name"]: port["containerPort"]
            for container in pod["containers"]
            for port in container.get("ports", [])
        }
        for port in service["spec"]["ports"]:
            assert offered[port["targetPort"]] == port["port"]


def test_a_sidecar_in_a_pod_cannot_take_its_neighbour_out_of_service() -> None:
    (pod,) = [pod for _, manifest, pod in PODS if name_of(manifest) == "StatefulSet-chat"]
    (sidecar,) = [item for item in pod["containers"] if item["image"] == "driftguard-sidecar"]
    assert "initContainers" not in pod
    assert not [key for key in sidecar if key.endswith("Probe")]


def beside_vllm(directory: Path, *lines: str) -> subprocess.Popen[bytes]:
    """The command of the sidecar in vLLM's pod, with these lines for `driftguard`, and no pauses."""
    for name, text in (("driftguard", lines), ("sleep", ("exec /bin/sleep 0.01",))):
        program = directory / name
        program.write_text("\n".join(["#!/bin/sh", *text]) + "\n")
        program.chmod(0o755)
    (container,) = [
        item
        for _, manifest, pod in PODS
        if name_of(manifest) == "StatefulSet-chat"
        for item in pod["containers"]
        if item["image"] == "driftguard-sidecar"
    ]
    return subprocess.Popen(
        container["command"], env={"PATH": f"{directory}:{os.defpath}"}, stdout=subprocess.PIPE
    )


@pytest.mark.parametrize("failing", ["db", "keys", "serve"])
def test_a_sidecar_that_does_not_start_leaves_its_container_running(tmp_path: Path, failing: str) -> None:
    """A pod with a container that has ended is not ready: its Service would lead no request to vLLM. Only
    `serve` refuses a database that may only be read."""
    lines = ["echo $1", f'[ "$1" != {failing} ] || exit 1', '[ "$1" != serve ] || exec /bin/sleep 60']
    with beside_vllm(tmp_path, *lines) as process:
        assert process.stdout is not None
        told = [process.stdout.readline().decode().strip() for _ in range(9)]
        assert told.count(failing) >= 3
        assert process.poll() is None
        process.kill()


def test_a_sidecar_beside_vllm_ends_in_order_with_its_pod(tmp_path: Path) -> None:
    ended = "trap 'echo ended; exit 0' TERM; echo begun; for _ in 1 2 3 4 5 6 7 8 9; do /bin/sleep 0.2; done"
    with beside_vllm(tmp_path, f'[ "$1" != serve ] || {{ {ended}; }}') as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == b"ended\n"
        process.wait(60)


def test_a_sidecar_beside_vllm_that_waits_for_its_database_ends_with_its_pod(tmp_path: Path) -> None:
    with beside_vllm(tmp_path, "echo waits; exit 1") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waits\n"
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        process.wait(60)


def test_an_engine_behind_a_proxy_in_its_pod_serves_until_that_has_answered_what_is_in_flight() -> None:
    """All containers of a pod are told to end at once."""
    (pod,) = [pod for _, _, pod in PODS if any(map(is_proxy, pod["containers"]))]
    waits = {one["name"]: int(one["lifecycle"]["preStop"]["exec"]["command"][1]) for one in pod["containers"]}
    ends = waits["proxy"] + ProxySettings().shutdown_grace_seconds + FLUSH_SECONDS
    assert ends < waits["vllm"] < pod["terminationGracePeriodSeconds"]


def test_one_sidecar_scrapes_at_a_time() -> None:
    """Two would count every source twice."""
    (deployment,) = [found for _, found in NATIVE if name_of(found) == "Deployment-driftguard"]
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}


def test_prometheus_calls_the_job_as_the_rules_do() -> None:
    assert scraped_services("driftguard") == {"driftguard", "chat-driftguard"}


def test_prometheus_scrapes_the_engine_for_its_dashboard() -> None:
    assert scraped_services("driftguard-engine") == {"engine"}


def test_prometheus_scrapes_proxies_at_their_admin_port() -> None:
    """Which no Service serves, so that nobody reaches it beside the model."""
    (monitor,) = [found["spec"] for _, found in OBJECTS if found["kind"] == "PodMonitor"]
    ((_, manifest, pod),) = [found for found in PODS if any(map(is_proxy, found[2]["containers"]))]
    labels = manifest["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["path"] == "/driftguard/metrics"
    ports = {port["name"]: port["containerPort"] for one in pod["containers"] for port in one["ports"]}
    assert ports[endpoint["port"]] == PROXY_PORTS["admin"]


def scraped_services(job: str) -> set[str]:
    """The names of the Services that the monitor of this job selects, each with the port that it scrapes."""
    (monitor,) = [
        found["spec"]
        for _, found in OBJECTS
        if found["kind"] == "ServiceMonitor" and found["metadata"]["name"] == job
    ]
    wanted = monitor["selector"]["matchLabels"]
    found = [
        service
        for _, service in NATIVE
        if service["kind"] == "Service" and wanted.items() <= service["metadata"]["labels"].items()
    ]
    assert {service["metadata"]["labels"][monitor["jobLabel"]] for service in found} == {job}
    (endpoint,) = monitor["endpoints"]
    assert endpoint["path"] == "/metrics"
    for service in found:
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    return {service["metadata"]["name"] for service in found}


def test_the_prometheus_rule_is_made_from_the_rules() -> None:
    """Differs? make alerts"""
    committed = KUBERNETES / "monitoring" / "prometheusrule.yaml"
    assert committed.read_text(encoding="utf-8") == kubernetes_manifest(COMMITTED)
    (rule,) = documents(committed)
    assert rule["spec"] == load(RULES)


@pytest.mark.parametrize(
    "file", sorted(KUBERNETES.rglob("kustomization.yaml")), ids=lambda file: file.parent.name
)
def test_a_kustomization_names_files_and_images_that_there_are(file: Path) -> None:
    (kustomization,) = documents(file)
    directory = file.parent
    named = {directory / resource for resource in kustomization["resources"]}
    assert all(resource.exists() for resource in named)
    listed = {path for path in directory.glob("*.yaml") if path != file}
    assert listed <= named
    used = {
        container["image"]
        for path, _, pod in PODS
        if path.parent == directory
        for container in pod["containers"]
    }
    images = {image["name"]: image["newTag"] for image in kustomization.get("images", [])}
    assert images == {image: VERSION for image in used if image in PORTS}


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed: make build/tools/helm")
@pytest.mark.parametrize("directory", ["base", "engine", "vllm", "proxy", "monitoring"])
def test_kustomize_renders_it(directory: str) -> None:
    assert KUBECTL is not None
    rendered = subprocess.run(
        [KUBECTL, "kustomize", KUBERNETES / directory], capture_output=True, text=True, check=True
    ).stdout
    images = re.findall(r"image: (\S+)", rendered)
    assert not set(images) & PORTS.keys()  # every one got its registry
    if directory == "engine":  # the patch of the sidecar reached it
        assert rendered.count("name: DRIFTGUARD_ENGINES") == 2
