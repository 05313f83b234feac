"""What arrives at PagerDuty, at Slack, in a mailbox and in Teams, written by the real Alertmanager with the
committed templates: the first line says it all, and every page is linked.

The alerts are those that the unit tests of the rules expect of Prometheus.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.alerting.http_receiver import Receiver, http_receiver, wait_until
from tests.alerting.smtp_sink import smtp_sink
from tests.alerts.committed import ALERTMANAGER, ALERTS, UNIT_TESTS, load
from tests.integration.committed_config import committed_alertmanager
from tests.integration.servers import (
    TEAMS_SINCE,
    alertmanager_version,
    needs_alertmanager,
    running_alertmanager,
)

pytestmark = needs_alertmanager

VERSION = alertmanager_version()
SENDS_TO_TEAMS = VERSION >= TEAMS_SINCE

SENTENCE = (
    "Acceptance of draft v1 (eagle3) on chat fell from 0.74 to 0.40 in segment code "
    "since 2027-01-15 08:00:00 UTC; about 31% slower"
)
INCIDENT, STREAM = "http://driftguard:8200/incidents/0b9f", "http://driftguard:8200/streams/7"
RUNBOOK = "http://driftguard:8200/runbooks/DriftGuardAcceptanceDrift"
DASHBOARD = (
    "http://grafana:3000/d/driftguard-stream?var-sidecar=http%3A%2F%2Fdriftguard%3A8200&var-server=chat"
)


@dataclass(frozen=True, slots=True)
class Fakes:
    """Where the messages of one Alertmanager arrive; every message goes to all of them."""

    alertmanager: str
    http: Receiver
    mails: list[EmailMessage]

    def bodies(self, name: str, group: str) -> list[dict[str, Any]]:
        found = [item.body for item in self.http.received if item.path == f"/hook/{name}"]
        return [body for body in found if f"server-{group}" in json.dumps(body)]

    def mails_of(self, group: str) -> list[EmailMessage]:
        return [mail for mail in self.mails if f"server-{group}" in mail["Subject"]]

    def cards(self, group: str) -> list[dict[str, Any]]:
        return [body["attachments"][0]["content"] for body in self.bodies("teams", group)]

    def send(self, group: str, alerts: Sequence[dict[str, Any]], count: int) -> None:
        """Posts alerts on server-GROUP, and waits for the `count`-th message about it at every receiver."""
        named = json.loads(json.dumps(alerts).replace("on chat", f"on server-{group}"))
        for alert in named:
            alert["labels"]["server"] = f"server-{group}"
        httpx.post(f"{self.alertmanager}/api/v2/alerts", json=named).raise_for_status()
        for name in ("pagerduty", "slack", "webhook", *(["teams"] if SENDS_TO_TEAMS else [])):
            wait_until(lambda: len(self.bodies(name, group)) == count, f"{count} at {name}")  # noqa: B023
        wait_until(lambda: len(self.mails_of(group)) == count, f"{count} mails")

    def teams(self, group: str) -> tuple[str, str]:
        """Title and text of the newest message, as they are written before Teams shows them. Where this
        Alertmanager is too old to send it, its amtool writes it, from what the webhook received."""
        if SENDS_TO_TEAMS:
            title, text = self.cards(group)[-1]["body"]
            return title["text"], text["text"]
        data = json.dumps(self.bodies("webhook", group)[-1])
        title, text = (
            subprocess.run(
                [
                    *("amtool", "template", "render", f"--template.glob={ALERTS}/templates/*.tmpl"),
                    *(f"--template.text={text}", "--template.data=/dev/stdin"),
                ],
                input=data,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for text in (teams_config()["title"], teams_config()["text"])
        )
        return title, text


def teams_config() -> dict[str, Any]:
    """The receiver for Teams, which is a comment as older versions refuse it."""
    lines = ALERTMANAGER.read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("  # - name: teams"))
    (receiver,) = yaml.safe_load("\n".join(line[4:] for line in lines[start : start + 6]))
    (config,) = receiver["msteamsv2_configs"]
    return dict(config)


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fakes]:
    with http_receiver() as receiver, smtp_sink() as (smtp, mails):
        document = yaml.safe_load(committed_alertmanager(receiver.url))
        document["global"] |= {"smtp_smarthost": smtp, "smtp_require_tls": False}
        every = {
            key: configs
            for named in document["receivers"]
            for key, configs in named.items()
            if key in ("pagerduty_configs", "slack_configs", "email_configs")
        }
        if SENDS_TO_TEAMS:
            every["msteamsv2_configs"] = [{**teams_config(), "webhook_url": f"{receiver.url}/teams"}]
        hook = {"url": f"{receiver.url}/webhook"}
        document["receivers"] = [{"name": "all", **every, "webhook_configs": [hook]}]
        document["route"] = {
            "receiver": "all",
            "group_by": document["route"]["group_by"],
            "group_wait": "200ms",
            "group_interval": "300ms",
            "repeat_interval": "1h",
        }
        directory: Path = tmp_path_factory.mktemp("alertmanager")
        with running_alertmanager(directory, yaml.safe_dump(document)) as url:
            yield Fakes(url, receiver, mails)


def drift(**labels: str) -> dict[str, Any]:
    """The alert of cluster eu in the rules' unit test about two clusters, with other labels."""
    (file,) = (file for file in UNIT_TESTS if file.stem == "acceptance_drift")
    alert = load(file)["tests"][-1]["alert_rule_test"][0]["exp_alerts"][0]
    assert alert["exp_labels"]["cluster"] == "eu"
    summary = alert["exp_annotations"]["summary"]
    assert summary == SENTENCE
    segment = labels.get("segment", "code")
    annotations = {
        **alert["exp_annotations"],
        "summary": summary.replace("segment code", f"segment {segment}"),
    }
    named = {"alertname": "DriftGuardAcceptanceDrift", **alert["exp_labels"], **labels}
    return {"labels": named, "annotations": annotations}


def ended(alert: dict[str, Any]) -> dict[str, Any]:
    return {**alert, "endsAt": datetime.now(UTC).isoformat()}


def plain(mail: EmailMessage, subtype: str) -> str:
    part = mail.get_body((subtype,))
    assert part is not None
    return str(part.get_content()).replace("\r\n", "\n")


def details_of(page: dict[str, Any]) -> dict[str, str]:
    """Of PagerDuty. What can be read as YAML, Alertmanager 0.33 sends as the value that it reads."""
    details: dict[str, str] = page["payload"]["custom_details"]
    for name in ("firing", "resolved", "labels"):
        with pytest.raises(yaml.YAMLError):
            yaml.safe_load(details[name])
    return {name: str(text).removeprefix("\t") for name, text in details.items()}


def test_one_alert_says_all_in_its_first_line_and_links_its_pages_and_so_does_its_end(fakes: Fakes) -> None:
    sentence = f"[eu] {SENTENCE}".replace("on chat", "on server-one")
    fakes.send("one", [drift()], 1)

    (page,) = fakes.bodies("pagerduty", "one")
    assert page["event_action"] == "trigger"
    assert (page["client"], page["client_url"]) == ("DriftGuard", INCIDENT)
    links = {link["text"]: link["href"] for link in page["links"]}
    dashboard = links.pop("Dashboard")
    assert dashboard.startswith(DASHBOARD)
    assert links == {"Incident": INCIDENT, "Stream": STREAM, "Runbook": RUNBOOK}
    told = page["payload"]
    assert told["summary"] == f"CRITICAL: {sentence}"
    assert [told[name] for name in ("severity", "class", "component", "group")] == [
        "critical",
        "DriftGuardAcceptanceDrift",
        "server-one",
        "eu",
    ]
    details = details_of(page)
    assert f"{sentence}\nThe target llama accepts fewer draft tokens. Likely cause: load" in details["firing"]
    assert f"Incident: {INCIDENT}\nStream: {STREAM}\n" in details["firing"]
    assert details["resolved"] == ""
    assert "namespace=llm " in details["labels"]

    ((message,),) = (body["attachments"] for body in fakes.bodies("slack", "one"))
    assert message["title"] == message["fallback"] == f"CRITICAL: {sentence}"
    assert message["title_link"] == INCIDENT
    assert message["text"].startswith("The target llama accepts fewer draft tokens.")
    escaped = dashboard.replace("&", "&amp;")
    urls = {**links, "Dashboard": escaped}
    for text, url in urls.items():
        assert f"<{url}|{text}>" in message["text"]

    (mail,) = fakes.mails_of("one")
    assert mail["Subject"] == f"CRITICAL: {sentence}"
    assert plain(mail, "plain").startswith(f"{sentence}\n")
    assert f"Incident: {INCIDENT}\n" in plain(mail, "plain")
    assert f"<b>{sentence}</b>" in plain(mail, "html")
    for text, url in urls.items():
        assert f'<a href="{url}">{text}</a>' in plain(mail, "html")

    title, text = fakes.teams("one")
    assert title == f"CRITICAL: {sentence}"
    assert f"[Incident]({INCIDENT}) [Stream]({STREAM}) [Dashboard]({dashboard}) [Runbook]({RUNBOOK})" in text

    fakes.send("one", [ended(drift())], 2)
    assert [page["event_action"] for page in fakes.bodies("pagerduty", "one")] == ["trigger", "resolve"]
    last = fakes.bodies("slack", "one")[-1]["attachments"][0]
    assert (last["title"], last["color"]) == (f"RESOLVED: {sentence}", "good")
    mail = fakes.mails_of("one")[-1]
    assert mail["Subject"] == f"RESOLVED: {sentence}"
    assert plain(mail, "plain").startswith(f"Resolved: {sentence}\n")
    assert fakes.teams("one")[0] == f"RESOLVED: {sentence}"


def test_alerts_of_one_group_are_all_told_each_with_its_pages_once(fakes: Fakes) -> None:
    """Two segments of one incident, and another stream, of which one segment ends."""
    other = drift(method="ngram")
    for name, own in (("incident_url", "/incidents/1c80"), ("stream_url", "/streams/8")):
        other["annotations"][name] = f"http://driftguard:8200{own}"
    other["annotations"]["summary"] = "Acceptance of draft v1 (ngram) on chat fell to 0.30 in segment code"
    alerts = [drift(), drift(segment="docs"), other]
    fakes.send("two", alerts, 1)
    first = f"[eu] {SENTENCE}".replace("on chat", "on server-two")
    told = {
        "pagerduty": details_of(fakes.bodies("pagerduty", "two")[0])["firing"],
        "slack": fakes.bodies("slack", "two")[0]["attachments"][0]["text"],
        "mail": plain(fakes.mails_of("two")[0], "plain"),
        "html": plain(fakes.mails_of("two")[0], "html"),
        "teams": fakes.teams("two")[1],
    }
    for name, text in told.items():
        for sentence in (first, first.replace("segment code", "segment docs")):
            assert text.count(sentence) == 1, name
        assert text.count("(ngram) on server-two fell to 0.30") == 1, name
        for page in ("/incidents/0b9f", "/incidents/1c80", "/streams/7", "/streams/8"):
            assert text.count(page) == 1, (name, page)
    assert fakes.bodies("pagerduty", "two")[0]["payload"]["summary"] == f"CRITICAL: {first} (1 of 3)"

    fakes.send("two", [ended(alerts[0]), *alerts[1:]], 2)
    details = details_of(fakes.bodies("pagerduty", "two")[-1])
    assert details["resolved"].startswith(f"Resolved: {first}\n")
    assert "segment docs" in details["firing"]
    assert "segment code" in fakes.bodies("slack", "two")[-1]["attachments"][0]["text"]


def unhealthy(problem: str) -> dict[str, Any]:
    """The alert about one problem of a sidecar in the rules' unit tests."""
    (file,) = (file for file in UNIT_TESTS if file.stem == "sidecar")
    alert = next(
        alert
        for test in load(file)["tests"]
        for case in test["alert_rule_test"]
        for alert in case["exp_alerts"]
        if alert["exp_labels"]["problem"] == problem
    )
    summary = f"{alert['exp_annotations']['summary']} on chat"
    return {
        "labels": {"alertname": "DriftGuardSidecarUnhealthy", **alert["exp_labels"], "instance": "a:8200"},
        "annotations": {**alert["exp_annotations"], "summary": summary},
    }


def test_the_gravest_problem_of_a_sidecar_comes_first_and_each_says_what_it_means(fakes: Fakes) -> None:
    """They have one page, and Alertmanager orders them by their names."""
    alerts = [unhealthy(problem) for problem in ("detector_stuck", "failing_chore", "ingest_stuck")]
    alerts[0]["labels"]["severity"] = "warning"
    fakes.send("eight", alerts, 1)
    gravest = alerts[2]["annotations"]["summary"].replace("on chat", "on server-eight")
    first = f"CRITICAL: {gravest} (1 of 3)"
    assert fakes.bodies("slack", "eight")[0]["attachments"][0]["title"] == first
    assert fakes.mails_of("eight")[0]["Subject"].replace("\n", "") == first
    assert fakes.teams("eight")[0] == first
    told = {
        "pagerduty": details_of(fakes.bodies("pagerduty", "eight")[0])["firing"],
        "slack": fakes.bodies("slack", "eight")[0]["attachments"][0]["text"],
        "mail": plain(fakes.mails_of("eight")[0], "plain"),
        "html": plain(fakes.mails_of("eight")[0], "html"),
        "teams": fakes.teams("eight")[1].replace("\\", ""),
    }
    for name, text in told.items():
        assert text.count("/runbooks/") == 1, name
        for alert in alerts:
            assert text.count(alert["annotations"]["description"]) == 1, name


def test_a_second_sidecar_that_dies_pages_again(fakes: Fakes) -> None:
    fakes.send("seven", [drift(instance="a:8200"), drift(instance="b:8200")], 2)
    assert len({page["dedup_key"] for page in fakes.bodies("pagerduty", "seven")}) == 2


def test_a_name_mentions_nobody_in_slack_and_is_no_html(fakes: Fakes) -> None:
    fakes.send("three", [drift(segment="<!channel> & <b>")], 1)
    message = fakes.bodies("slack", "three")[0]["attachments"][0]
    assert "in segment &lt;!channel&gt; &amp; &lt;b&gt; since" in message["title"]
    assert "<!channel>" not in json.dumps(message)
    assert "segment &lt;!channel&gt; &amp; &lt;b&gt; since" in plain(fakes.mails_of("three")[0], "html")


def test_a_name_links_nothing_and_emphasises_nothing_in_teams(fakes: Fakes) -> None:
    fakes.send("five", [drift(segment="*x*](http://evil) `_y_` \\")], 1)
    title, text = fakes.teams("five")
    for part in (title, text):
        assert r"in segment \*x\*\](http://evil) \`\_y\_\` \\ since" in part
    assert f"[Incident]({INCIDENT})" in text


@pytest.mark.skipif(
    not SENDS_TO_TEAMS,
    reason=f"Alertmanager {'.'.join(map(str, VERSION))} has no receiver for Teams; 0.28 and later have",
)
def test_teams_gets_an_adaptive_card(fakes: Fakes) -> None:
    fakes.send("six", [drift()], 1)
    (body,) = fakes.bodies("teams", "six")
    assert body["type"] == "message"
    (attachment,) = body["attachments"]
    assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
    card = attachment["content"]
    assert card["type"] == "AdaptiveCard"
    assert [(part["type"], part["wrap"]) for part in card["body"]] == [("TextBlock", True)] * 2
    fakes.send("six", [ended(drift())], 2)
    assert [card["body"][0]["color"] for card in fakes.cards("six")] == ["Attention", "Good"]


def test_an_alert_without_any_page_and_description_is_told_too(fakes: Fakes) -> None:
    """The mailbox of the example is where everything else goes, also alerts of others."""
    labels = {"alertname": "DiskFull", "server": "four"}
    fakes.send("four", [{"labels": labels, "annotations": {"summary": "Full on chat"}}], 1)
    assert fakes.mails_of("four")[0]["Subject"] == "WARNING: Full on server-four"
    (page,) = fakes.bodies("pagerduty", "four")
    assert "links" not in page
    assert page["payload"]["severity"] == "critical"
