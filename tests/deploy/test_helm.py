"""The Helm chart, rendered by helm itself: it checks its values, Kubernetes would take what it renders, and
the sidecar reads its own settings from it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from pydantic import ValidationError

from dashboards.frame import STATUS_PAGE
from driftguard.adapters.kinds import ADAPTERS
from driftguard.alerting.rules.generate import kubernetes_manifest
from driftguard.alerting.rules.parameters import RuleParameters
from driftguard.settings import AlertingSettings, Settings, SourceSettings
from driftguard.settings.loading import load_settings
from driftguard.settings.model import OWN_PATHS
from tests.deploy.committed import DEPLOY, KUBERNETES, ROOT, VERSION, documents, set_environment, tool
from tests.deploy.test_kubernetes import KUBERNETES_VERSION, environment

CHART = DEPLOY / "helm" / "driftguard"
HELM = tool("helm")
ENDS_WITHIN_SECONDS = 15  # the sidecar, of SIGTERM, whatever hangs
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed: make build/tools/helm")
IMAGE = ("image.repository=registry.example.com/driftguard-sidecar",)
ADDRESS = "externalUrl=https://driftguard.example.com"
SOURCES = [{"url": "http://chat:8000/metrics", "server": "chat-0", "num_speculative_tokens": 4}]
EVERYTHING = (
    *IMAGE,
    f"{ADDRESS}/",
    "replicas=2",
    "ingress.enabled=true",
    "ingress.tlsSecretName=tls",
    "networkPolicy.enabled=true",
    "monitoring.serviceMonitor.enabled=true",
    "monitoring.rules.enabled=true",
    "dashboards.enabled=true",
)
PEERS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)


def given(values: tuple[str, ...], **lists: Any) -> list[str]:
    return [
        *(word for value in values for word in ("--set", value)),
        *("--set-json", f"networkPolicy.from={json.dumps(PEERS)}"),
        *("--set-json", f"sources={json.dumps(SOURCES)}"),
        *(word for name, value in lists.items() for word in ("--set-json", f"{name}={json.dumps(value)}")),
    ]


def rendered(*values: str, release: str = "driftguard", **lists: Any) -> dict[str, dict[str, Any]]:
    """Kind-name -> object."""
    done = helm("template", release, str(CHART), *given(values, **lists))
    assert done.returncode == 0, done.stderr
    found = [document for document in yaml.safe_load_all(done.stdout) if document]
    return {f"{item['kind']}-{item['metadata']['name']}": item for item in found}


@needs_helm
@pytest.mark.parametrize("values", [IMAGE, EVERYTHING], ids=["least", "everything"])
def test_helm_and_kubernetes_would_take_it(values: tuple[str, ...]) -> None:
    linted = helm("lint", "--strict", str(CHART), *given(values))
    assert linted.returncode == 0, linted.stdout + linted.stderr
    for manifest in rendered(*values).values():
        if "monitoring.coreos.com" not in manifest["apiVersion"]:
            kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


@needs_helm
def test_the_pods_are_those_of_the_kustomization() -> None:
    """But for names, labels and what values set."""
    (base,) = documents(KUBERNETES / "base" / "deployment.yaml")
    own = rendered(*IMAGE)["Deployment-driftguard"]
    assert own["spec"]["strategy"] == base["spec"]["strategy"]
    wanted, found = base["spec"]["template"]["spec"], own["spec"]["template"]["spec"]
    for container, other in zip(
        [*wanted["initContainers"], *wanted["containers"]],
        [*found["initContainers"], *found["containers"]],
        strict=True,
    ):
        assert other.pop("image") == f"registry.example.com/driftguard-sidecar:{VERSION}"
        assert other.pop("imagePullPolicy") == "IfNotPresent"
        assert other["env"].pop()["name"] == "DRIFTGUARD_SOURCES"
        del container["image"]
    assert found == wanted


@needs_helm
def test_of_two_pods_one_that_ends_serves_until_no_more_requests_are_led_to_it() -> None:
    pod = rendered(*EVERYTHING)["Deployment-driftguard"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    program, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    assert int(seconds) + ENDS_WITHIN_SECONDS < pod.get("terminationGracePeriodSeconds", 30)


@needs_helm
@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("null", {}),  # OpenShift chooses one of the namespace's, and refuses a pod that names another
        ("1000670000", dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), 1000670000)),
    ],
)
def test_the_platform_may_choose_the_user(user: str, expected: dict[str, int]) -> None:
    pod = rendered(*IMAGE, f"runAsUser={user}")["Deployment-driftguard"]["spec"]["template"]["spec"]
    rest = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert pod["securityContext"] == {**rest, **expected}


@needs_helm
def test_a_drain_does_not_wait_for_a_sidecar_that_waits_for_its_database() -> None:
    """No pod is ready then, so that the budget alone would keep all of them until the database is back."""
    budget = rendered(*EVERYTHING)["PodDisruptionBudget-driftguard"]["spec"]
    assert (budget["minAvailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")


@needs_helm
def test_the_sidecar_reads_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = rendered(*EVERYTHING)
    (container,) = objects["Deployment-driftguard"]["spec"]["template"]["spec"]["containers"]
    variables = environment(container)
    (tmp_path / "driftguard.toml").write_text(objects["ConfigMap-driftguard"]["data"]["driftguard.toml"])
    del variables["DRIFTGUARD_CONFIG"]
    set_environment(monkeypatch, variables)
    settings = load_settings(tmp_path / "driftguard.toml")
    assert [(source.server, source.num_speculative_tokens) for source in settings.sources] == [("chat-0", 4)]
    assert settings.alerting.external_url == "https://driftguard.example.com/"
    assert not settings.retraining.automatic


@needs_helm
def test_the_key_of_a_source_comes_from_a_secret() -> None:
    """Kubernetes puts in place of $(NAME) only what a variable above has."""
    key = {"name": "ROUTER_KEY", "valueFrom": {"secretKeyRef": {"name": "driftguard", "key": "api-key"}}}
    sources = [{**SOURCES[0], "api_key": "$(ROUTER_KEY)"}]
    objects = rendered(*IMAGE, sources=sources, environment=[key])
    pod = objects["Deployment-driftguard"]["spec"]["template"]["spec"]
    for container in [*pod["initContainers"], *pod["containers"]]:
        (source,) = json.loads(environment(container)["DRIFTGUARD_SOURCES"])
        assert source["api_key"] == "k" * 64


@needs_helm
@pytest.mark.parametrize(
    "settings",
    [
        "",
        '  [retraining]\n  automatic = false\nlog_level = "info"\n',
        '\n# Grüße\n[alerting.labels]\nteam = "a\\"b" # {{ .Values }} $(HOME)\n',
    ],
    ids=["none", "indented", "characters"],
)
def test_the_settings_are_mounted_as_they_are(tmp_path: Path, settings: str) -> None:
    file = tmp_path / "driftguard.toml"
    file.write_text(settings, encoding="utf-8")
    done = helm("template", "driftguard", str(CHART), *given(IMAGE), "--set-file", f"settings={file}")
    assert done.returncode == 0, done.stderr
    (config,) = [each for each in yaml.safe_load_all(done.stdout) if each and each["kind"] == "ConfigMap"]
    assert config["data"] == {"driftguard.toml": settings}


@needs_helm
def test_sources_in_two_places_are_refused_as_those_of_one_would_not_be_scraped(tmp_path: Path) -> None:
    """The sidecar takes its variable in place of what the file has, without a word."""
    file = tmp_path / "driftguard.toml"
    file.write_text('[[sources]]\nurl = "http://code:8000/metrics"\n', encoding="utf-8")
    arguments = ("template", "driftguard", str(CHART), "--set-file", f"settings={file}")
    both = helm(*arguments, *given(IMAGE))
    assert both.returncode != 0
    assert "sources" in both.stderr
    assert helm(*arguments, "--set", IMAGE[0]).returncode == 0


@needs_helm
def test_authorities_and_certificates_can_be_mounted() -> None:
    """Of the database (sslrootcert), engines and receivers of pages (SSL_CERT_FILE): for setup too."""
    volume = {"name": "authorities", "configMap": {"name": "company-ca"}}
    mount = {"name": "authorities", "mountPath": "/etc/ssl/company", "readOnly": True}
    lists: Any = {"volumes": [volume], "volumeMounts": [mount]}
    deployment = rendered(*IMAGE, **lists)["Deployment-driftguard"]
    kubernetes_validate.validate(deployment, KUBERNETES_VERSION, strict=True)
    pod = deployment["spec"]["template"]["spec"]
    assert [one["name"] for one in pod["volumes"]] == ["settings", "data", "tmp", "authorities"]
    for container in [*pod["initContainers"], *pod["containers"]]:
        assert mount in container["volumeMounts"]
        assert len(container["volumeMounts"]) == 4


@needs_helm
def test_a_private_key_of_a_secret_can_be_read_and_by_nobody_else(tmp_path: Path) -> None:
    """libpq refuses one (sslkey) that others may read, and the files of a Secret belong to root: they are
    readable by the pod's user through a group alone."""
    client = "{name: client, secret: {secretName: client, defaultMode: 0440}}"
    file = tmp_path / "values.yaml"
    file.write_text(f"image: {{repository: registry.example.com/driftguard}}\nvolumes: [{client}]\n")
    done = helm("template", "driftguard", str(CHART), "--values", str(file))
    objects = [document for document in yaml.safe_load_all(done.stdout) if document]
    (pod,) = [item["spec"]["template"]["spec"] for item in objects if item["kind"] == "Deployment"]
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    assert pod["volumes"][-1]["secret"]["defaultMode"] == 0o440


@needs_helm
def test_changed_settings_restart_the_pods() -> None:
    def annotations(settings: str) -> dict[str, str]:
        objects = rendered(*IMAGE, f"settings={settings}")
        found: dict[str, str] = objects["Deployment-driftguard"]["spec"]["template"]["metadata"][
            "annotations"
        ]
        return found

    assert annotations('log_level = "info"') != annotations('log_level = "debug"')


@needs_helm
@pytest.mark.parametrize("grafana", [None, "https://grafana.example.com"])
def test_rules_and_dashboards_are_the_committed_ones_with_the_addresses_of_the_installation(
    grafana: str | None,
) -> None:
    objects = rendered(*EVERYTHING, *([f"grafanaUrl={grafana}/"] if grafana else ()))
    parameters = RuleParameters(base_url="https://driftguard.example.com", grafana_url=grafana)
    (wanted,) = yaml.safe_load_all(kubernetes_manifest(parameters))
    assert objects["PrometheusRule-driftguard"]["spec"] == wanted["spec"]
    for name in ("engine", "fleet", "retraining", "stream"):
        config = objects[f"ConfigMap-driftguard-{name}"]
        assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
        ((file, content),) = config["data"].items()
        committed = (ROOT / "dashboards" / file).read_text(encoding="utf-8")
        ours = committed.replace(f'"{STATUS_PAGE}"', '"https://driftguard.example.com"')
        assert json.loads(content) == json.loads(ours) != json.loads(committed)


@needs_helm
def test_dashboards_need_no_label() -> None:
    """Where Grafana mounts them, its sidecar container is not to pick them up too."""
    objects = rendered(*IMAGE, "dashboards.enabled=true", "dashboards.labels.grafana_dashboard=null")
    labels = objects["ConfigMap-driftguard-fleet"]["metadata"]["labels"]
    assert "grafana_dashboard" not in labels
    assert labels["app.kubernetes.io/name"] == "driftguard"


@needs_helm
def test_without_an_address_dashboards_link_the_one_of_a_port_that_is_forwarded() -> None:
    config = rendered(*IMAGE, "dashboards.enabled=true")["ConfigMap-driftguard-fleet"]
    committed = (ROOT / "dashboards" / "driftguard-fleet.json").read_text(encoding="utf-8")
    assert json.loads(config["data"]["driftguard-fleet.json"]) == json.loads(committed)


@needs_helm
@pytest.mark.parametrize(
    ("address", "path"),
    [("", "/"), ("/", "/"), ("/driftguard", "/driftguard"), ("/team/driftguard/", "/team/driftguard")],
)
def test_the_ingress_serves_the_path_of_the_address_and_no_more(address: str, path: str) -> None:
    objects = rendered(*IMAGE, f"{ADDRESS}{address}", "ingress.enabled=true", "monitoring.rules.enabled=true")
    (rule,) = objects["Ingress-driftguard"]["spec"]["rules"]
    assert rule["host"] == "driftguard.example.com"
    assert [(each["path"], each["pathType"]) for each in rule["http"]["paths"]] == [(path, "Prefix")]
    runbook = f"https://driftguard.example.com{address}".rstrip("/") + "/runbooks/DriftGuardRollback"
    assert runbook in str(objects["PrometheusRule-driftguard"])


@needs_helm
def test_the_ingress_has_the_host_as_kubernetes_takes_it() -> None:
    address = "externalUrl=https://DriftGuard.Example.com"
    values = (*IMAGE, address, "ingress.enabled=true", "ingress.tlsSecretName=tls")
    ingress = rendered(*values)["Ingress-driftguard"]["spec"]
    assert ingress["rules"][0]["host"] == "driftguard.example.com"
    assert ingress["tls"][0]["hosts"] == ["driftguard.example.com"]


@needs_helm
def test_prometheus_finds_the_service_and_calls_the_job_as_the_rules_do() -> None:
    objects = rendered(*EVERYTHING, release="eu")
    service, monitor = objects["Service-eu-driftguard"], objects["ServiceMonitor-eu-driftguard"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "driftguard"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    pod = objects["Deployment-eu-driftguard"]["spec"]["template"]["metadata"]["labels"]
    policy = objects["NetworkPolicy-eu-driftguard"]["spec"]
    for selector in (
        service["spec"]["selector"],
        policy["podSelector"]["matchLabels"],
        objects["PodDisruptionBudget-eu-driftguard"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= pod.items()
    assert policy["ingress"] == [{"from": PEERS, "ports": [{"protocol": "TCP", "port": "http"}]}]


@needs_helm
def test_prometheus_sends_a_key_where_reading_needs_one() -> None:
    """Else it gets 401 of every sidecar, and pages that all are down."""
    key: Any = {"type": "Bearer", "credentials": {"name": "driftguard", "key": "api-key"}}
    monitored = (*IMAGE, "monitoring.serviceMonitor.enabled=true")
    usual = {"port": "http", "path": "/metrics", "interval": "15s"}
    (endpoint,) = rendered(*monitored)["ServiceMonitor-driftguard"]["spec"]["endpoints"]
    assert endpoint == usual
    objects = rendered(*monitored, **{"monitoring.serviceMonitor.authorization": key})
    (endpoint,) = objects["ServiceMonitor-driftguard"]["spec"]["endpoints"]
    assert endpoint == {**usual, "authorization": key}


@needs_helm
@pytest.mark.parametrize(
    ("values", "named"),
    [
        ((), "image.repository"),
        ((*IMAGE, "replicas=0"), "replicas"),
        ((*IMAGE, "externalUrl=driftguard.example.com"), "externalUrl"),
        ((*IMAGE, "serviceMonitor.enabled=true"), "serviceMonitor"),
        ((*IMAGE, "ingress.enabled=true"), "externalUrl"),
        ((*IMAGE, "monitoring.rules.enabled=true"), "externalUrl"),
        (
            (*IMAGE, "externalUrl=https://ops:99999"),
            "externalUrl: the port of https://ops:99999 is above 65535",
        ),
        ((*IMAGE, "grafanaUrl=https://ops:70000/g"), "grafanaUrl: the port of"),
        ((*IMAGE, "sources[0].url=http://chat:65536/metrics"), "sources: the port of"),
    ],
)
def test_wrong_values_are_refused_by_name(values: tuple[str, ...], named: str) -> None:
    done = helm("template", "driftguard", str(CHART), *given(values))
    assert done.returncode != 0
    assert named in done.stderr


@needs_helm
def test_the_greatest_port_is_taken() -> None:
    rendered(*IMAGE, "externalUrl=https://ops:65535", sources=[{"url": "http://[::1]:65535/metrics"}])


@needs_helm
def test_a_release_whose_name_no_service_can_have_is_refused() -> None:
    done = helm("template", "7-chat", str(CHART), *given(IMAGE))
    assert done.returncode != 0
    assert "the release 7-chat: its name has to begin with a letter" in done.stderr


@needs_helm
@pytest.mark.parametrize(
    ("least", "is_taken"),
    [(1, True), (2, True), (3, False), (4, False), ("66%", True), ("67%", False), ("100%", False)],
)
def test_a_drain_of_nodes_that_could_never_end_is_refused(least: int | str, is_taken: bool) -> None:
    """Of three replicas; Kubernetes rounds a part of them up."""
    values = given((*IMAGE, "replicas=3"), **{"podDisruptionBudget.minAvailable": least})
    done = helm("template", "driftguard", str(CHART), *values)
    assert (done.returncode == 0) == is_taken
    assert is_taken or "podDisruptionBudget.minAvailable" in done.stderr


@needs_helm
def test_settings_may_be_taken_out() -> None:
    taken_out = rendered(*IMAGE, settings=None)
    assert taken_out["ConfigMap-driftguard"]["data"] == {"driftguard.toml": ""}


@needs_helm
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"draft_version": 20261101}, "draft_version"),  # as YAML reads it without quotation marks
        ({"draft": 1.1}, "draft"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"sever": "chat-0"}, "sever"),
        ({"segment": ""}, "segment"),
    ],
)
def test_a_source_at_which_the_sidecar_would_not_start_is_refused_by_name(
    wrong: dict[str, Any], named: str
) -> None:
    """The pods before are gone by then."""
    source = {**SOURCES[0], **wrong}
    with pytest.raises(ValidationError):
        Settings(sources=[source])
    done = helm("template", "driftguard", str(CHART), *given(IMAGE, sources=[source]))
    assert done.returncode != 0
    assert "/sources/0" in done.stderr
    assert named in done.stderr


@needs_helm
@pytest.mark.parametrize(
    "address",
    [
        *(f"https://ops.example.com{path.rstrip('/')}" for path in ("/api", *OWN_PATHS)),
        "https://ops.example.com/dashboards/",
        "https://ops.example.com/a//b",
        "https://ops.example.com/a/../b",
        "https://ops.example.com/a%20b",
        "https://ops.example.com:8200x",
        "https:///driftguard",
    ],
)
def test_an_address_at_which_the_sidecar_would_not_start_is_refused_by_name(address: str) -> None:
    with pytest.raises(ValidationError):
        Settings(alerting=AlertingSettings(external_url=address))
    done = helm("template", "driftguard", str(CHART), *given((*IMAGE, f"externalUrl={address}")))
    assert done.returncode != 0
    assert "externalUrl" in done.stderr


@needs_helm
@pytest.mark.parametrize(
    "address",
    [
        "https://ops.example.com/driftguard/",
        "http://ops.example.com:8200/a/metrics",
        "https://ops.example.com/metrics-of-drafts",
        "http://[::1]:8200",
    ],
)
def test_an_address_at_which_the_sidecar_starts_is_taken(address: str) -> None:
    Settings(alerting=AlertingSettings(external_url=address))
    assert rendered(*IMAGE, f"externalUrl={address}")


def test_the_chart_knows_every_setting_of_a_source() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    known = schema["properties"]["sources"]["items"]["properties"]
    assert known.keys() == SourceSettings.model_fields.keys()
    assert set(known["kind"]["enum"]) == ADAPTERS.keys()


@needs_helm
def test_a_policy_without_peers_is_refused() -> None:
    done = helm(
        *("template", "driftguard", str(CHART), "--set", IMAGE[0], "--set", "networkPolicy.enabled=true")
    )
    assert done.returncode != 0
    assert "networkPolicy.from" in done.stderr


@needs_helm
@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, ["carry no links", "No servers are scraped"]),
        ({"externalUrl": "https://driftguard.example.com", "sources": SOURCES}, []),
        (
            {
                "settings": '[alerting]\nexternal_url = "https://driftguard.example.com"\n'
                '[[sources]]\nurl = "http://chat:8000/metrics"\n'
            },
            [],
        ),
        ({"settings": '# [[sources]]\n# external_url = ""\n'}, ["carry no links", "No servers are scraped"]),
        (
            {
                "environment": [
                    {"name": "DRIFTGUARD_SOURCES", "value": json.dumps(SOURCES)},
                    {"name": "DRIFTGUARD_ALERTING__EXTERNAL_URL", "value": "https://driftguard.example.com"},
                ]
            },
            [],
        ),
    ],
    ids=["nowhere", "values", "settings", "comments", "environment"],
)
def test_what_is_missing_is_told_after_the_installation(
    tmp_path: Path, values: dict[str, Any], told: list[str]
) -> None:
    """Wherever it may be set."""
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump({"image": {"repository": "registry.example.com/driftguard"}, **values}))
    done = helm("install", "driftguard", str(CHART), "--values", str(file), "--dry-run=client")
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert [text for text in ("carry no links", "No servers are scraped") if text in notes] == told


def test_the_chart_has_the_version_of_the_project() -> None:
    (chart,) = documents(CHART / "Chart.yaml")
    assert chart["version"] == chart["appVersion"] == VERSION


@needs_helm
def test_the_example_of_the_guide_lets_in_everybody_who_is_to_reach_the_sidecar(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "production.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(# values.yaml.*?)```", guide, re.DOTALL)
    values = tmp_path / "values.yaml"
    values.write_text(example, encoding="utf-8")
    done = helm("template", "driftguard", str(CHART), "--values", str(values))
    assert done.returncode == 0, done.stderr
    objects = {item["kind"]: item for item in yaml.safe_load_all(done.stdout) if item}
    (rule,) = objects["NetworkPolicy"]["spec"]["ingress"]
    peers = {peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for peer in rule["from"]}
    assert objects["Ingress"]["spec"]["ingressClassName"] == "nginx"
    # Prometheus; the engines; and the controller of the Ingress, by which people open the pages
    assert peers == {"monitoring", "llm", "ingress-nginx"}
