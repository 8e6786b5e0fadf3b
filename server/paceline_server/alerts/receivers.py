"""Receivers of alerts, one class per kind.

DeliveryError
└── RefusedError    the receiver rejects the notice; do not retry
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from paceline_server.act.announce import ActionNotice, IncidentAlert, Notice
from paceline_server.alerts.chat import chat_text
from paceline_server.detect.kinds import Severity
from paceline_server.settings import Settings

_TIMEOUT_SECONDS = 5.0
# Client errors that are worth a retry.
_RETRIED_STATUSES = frozenset({408, 425, 429})
_SLACK_DOMAINS = ("slack.com", "slack-gov.com")  # need HTML entities; others would show them


class DeliveryError(Exception):
    """Not delivered. Retry later, but not before `retry_after_seconds`."""

    def __init__(self, message: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class RefusedError(DeliveryError):
    """The receiver rejects this notice; a retry would fail too."""


class Receiver(Protocol):
    """Delivers notices to one target. `name` is stored in outbox rows: never change it."""

    name: str
    takes_incidents: bool
    takes_actions: bool
    minimum_severity: Severity  # least severe incidents that it gets

    def deliver(self, client: httpx.Client, key: str, notice: Notice, now_ns: int) -> None:
        """Deliver one notice; `key` is the same at each attempt. Raises DeliveryError."""

    def repeat(self, client: httpx.Client, firing: Sequence[IncidentAlert], now_ns: int) -> None:
        """Repeat firing alerts if the receiver would expire them. Raises DeliveryError."""


class Webhook:
    """POSTs each notice as JSON; `Idempotency-Key` is the same at each attempt."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        incidents: bool,
        actions: bool,
        minimum_severity: Severity = "warning",
    ) -> None:
        self.name = name
        self.takes_incidents = incidents
        self.takes_actions = actions
        self.minimum_severity = minimum_severity
        self._url = url

    def deliver(self, client: httpx.Client, key: str, notice: Notice, now_ns: int) -> None:
        body = msgspec.to_builtins(notice)
        if isinstance(notice, ActionNotice):
            body["action"].pop("parameters", None)  # internal to `decide`
        _post(client, self._url, body, {"Idempotency-Key": key})

    def repeat(self, client: httpx.Client, firing: Sequence[IncidentAlert], now_ns: int) -> None:
        """Do nothing: webhooks do not expire alerts."""


class Chat:
    """POSTs `{"text": ...}`, the format of Slack, Mattermost, Rocket.Chat and Google Chat."""

    name = "chat"
    takes_incidents = True
    takes_actions = True

    def __init__(
        self, url: str, external_url: str | None, minimum_severity: Severity = "warning"
    ) -> None:
        self.minimum_severity = minimum_severity
        self._url = url
        self._external_url = external_url
        self._is_slack = (urlsplit(url).hostname or "").endswith(_SLACK_DOMAINS)

    def deliver(self, client: httpx.Client, key: str, notice: Notice, now_ns: int) -> None:
        text = chat_text(notice)
        if self._is_slack:
            text = text.replace("&", "&amp;")
        if text and self._external_url is not None:
            text += f"\n{_page(self._external_url, notice)}"
        if text:
            _post(client, self._url, {"text": text}, {"Idempotency-Key": key})

    def repeat(self, client: httpx.Client, firing: Sequence[IncidentAlert], now_ns: int) -> None:
        """Do nothing: chat messages do not expire."""


class Alertmanager:
    """Pushes to the v2 API of Alertmanager: an open incident fires until it is resolved.

    Alertmanager resolves an alert whose `endsAt` has passed. Each push sets it `lasting_seconds`
    ahead, and firing alerts are pushed again before that.
    """

    name = "alertmanager"
    takes_incidents = True
    takes_actions = False

    def __init__(
        self,
        url: str,
        external_url: str | None,
        lasting_seconds: float,
        minimum_severity: Severity = "warning",
    ) -> None:
        self.minimum_severity = minimum_severity
        self._url = url.rstrip("/") + "/api/v2/alerts"
        self._external_url = external_url
        self._lasting_ns = int(lasting_seconds * 1e9)

    def deliver(self, client: httpx.Client, key: str, notice: Notice, now_ns: int) -> None:
        assert isinstance(notice, IncidentAlert), "actions are not routed here"
        alerts = [self._alert(notice, now_ns)]
        if notice.previous_severity is not None:
            # The severity is a label: the alert with the old severity is a separate one. End it.
            alerts.append(self._alert(notice, now_ns, ended_severity=notice.previous_severity))
        _post(client, self._url, alerts, {})

    def repeat(self, client: httpx.Client, firing: Sequence[IncidentAlert], now_ns: int) -> None:
        if firing:
            _post(client, self._url, [self._alert(alert, now_ns) for alert in firing], {})

    def _alert(
        self, notice: IncidentAlert, now_ns: int, ended_severity: str | None = None
    ) -> dict[str, Any]:
        incident = notice.incident
        finding = incident.finding
        if incident.resolved_ns is not None and ended_severity is None:
            ends_ns = incident.resolved_ns
        elif ended_severity is not None or notice.event == "resolved":
            ends_ns = now_ns
        else:
            ends_ns = now_ns + self._lasting_ns
        alert = {
            "labels": {
                "alertname": f"Paceline{finding.kind.capitalize()}",
                "severity": ended_severity or finding.severity,
                "job_id": notice.job_id,
                "job_name": notice.job_name,
                "incident": incident.incident_id,
            },
            "annotations": {"summary": finding.summary, "cause": finding.cause}
            | ({} if finding.rank is None else {"rank": str(finding.rank)})
            | ({} if finding.node is None else {"node": finding.node}),
            "startsAt": _time(incident.opened_ns),
            "endsAt": _time(ends_ns),
        }
        if self._external_url is not None:
            alert["generatorURL"] = _page(self._external_url, notice)
        return alert


def receivers(settings: Settings) -> list[Receiver]:
    """Return the receivers that are configured."""
    found: list[Receiver] = []
    if settings.webhook_url is not None:
        url, minimum = settings.webhook_url, settings.webhook_severity
        webhook = Webhook("webhook", url, incidents=True, actions=False, minimum_severity=minimum)
        found.append(webhook)
    if settings.action_webhook_url is not None:
        url = settings.action_webhook_url
        found.append(Webhook("action-webhook", url, incidents=False, actions=True))
    if settings.chat_webhook_url is not None:
        url, minimum = settings.chat_webhook_url, settings.chat_severity
        found.append(Chat(url, settings.external_url, minimum))
    if settings.alertmanager_url is not None:
        # Three pushes may fail before an alert expires.
        lasting = 4 * settings.alert_repeat_seconds
        url, minimum = settings.alertmanager_url, settings.alertmanager_severity
        found.append(Alertmanager(url, settings.external_url, lasting, minimum))
    return found


def _page(external_url: str, notice: Notice) -> str:
    return f"{external_url.rstrip('/')}/jobs/{quote(notice.job_id, safe='')}"


def _post(client: httpx.Client, url: str, body: object, headers: dict[str, str]) -> None:
    """POST JSON. Only the status counts: the body of the response is not read."""
    content = msgspec.json.encode(body)
    headers = {"Content-Type": "application/json", **headers}
    try:
        with client.stream(
            "POST", url, content=content, headers=headers, timeout=_TIMEOUT_SECONDS
        ) as response:
            pass
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DeliveryError(f"{type(error).__name__}: {error}") from error
    if response.is_success:
        return
    detail = f"receiver responded {response.status_code}"
    if response.next_request is not None:  # the rest of its address may be secret
        to = response.next_request.url
        raise RefusedError(
            f"{detail}, a redirect to {to.scheme}://{to.host}/...: configure that address"
        )
    if not response.is_server_error and response.status_code not in _RETRIED_STATUSES:
        raise RefusedError(detail)
    raise DeliveryError(detail, _seconds_until(response.headers.get("Retry-After", "")))


def _seconds_until(retry_after: str) -> float:
    """Parse `Retry-After` (RFC 9110, 10.2.3), seconds or a date; return 0 if it is neither."""
    if retry_after.isascii() and retry_after.isdigit():
        return float(retry_after)
    try:
        return parsedate_to_datetime(retry_after).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0


def _time(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, UTC).isoformat()
