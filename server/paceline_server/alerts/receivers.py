"""Who can be told: one class per kind of receiver.

DeliveryError
└── RefusedError    the receiver will never take it; do not try again
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
from paceline_server.alerts.chat import text_of
from paceline_server.settings import Settings

_TIMEOUT_SECONDS = 5.0
# Worth another try although the receiver answered.
_PASSING = frozenset({408, 425, 429})
_SLACK = ("slack.com", "slack-gov.com")  # reads &lt; and the like; others show them


class DeliveryError(Exception):
    """Not delivered; try again later, but not before `retry_after_seconds`."""

    def __init__(self, message: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class RefusedError(DeliveryError):
    """The receiver says that this very message is wrong."""


class Receiver(Protocol):
    """`name` is kept in outbox rows: never rename one."""

    name: str
    takes_incidents: bool
    takes_actions: bool

    def deliver(self, client: httpx.Client, key: str, notice: Notice, now_ns: int) -> None:
        """`key` is the same at each try. Raises DeliveryError."""

    def repeat(self, client: httpx.Client, firing: Sequence[IncidentAlert], now_ns: int) -> None:
        """Tell again what still fires, if the receiver would forget it. Raises DeliveryError."""


class Webhook:
    """POSTs each notice as JSON; `Idempotency-Key` is the same at each try."""

    def __init__(self, name: str, url: str, *, incidents: bool, actions: bool) -> None:
        self.name = name
        self.takes_incidents = incidents
        self.takes_actions = actions
        self._url = url

    def deliver(self, client: httpx.Client, key: str, notice: Notice, now_ns: int) -> None:
        body = msgspec.to_builtins(notice)
        if isinstance(notice, ActionNotice):
            body["action"].pop("parameters", None)  # private to `decide`
        _post(client, self._url, body, {"Idempotency-Key": key})

    def repeat(self, client: httpx.Client, firing: Sequence[IncidentAlert], now_ns: int) -> None:
        """A webhook remembers by itself."""


class Chat:
    """POSTs `{"text": ...}`, as Slack, Mattermost, Rocket.Chat and Google Chat take it."""

    name = "chat"
    takes_incidents = True
    takes_actions = True

    def __init__(self, url: str, external_url: str | None) -> None:
        self._url = url
        self._external_url = external_url
        self._is_slack = (urlsplit(url).hostname or "").endswith(_SLACK)

    def deliver(self, client: httpx.Client, key: str, notice: Notice, now_ns: int) -> None:
        text = text_of(notice)
        if self._is_slack:
            text = text.replace("&", "&amp;")
        if text and self._external_url is not None:
            text += f"\n{_page(self._external_url, notice)}"
        if text:
            _post(client, self._url, {"text": text}, {"Idempotency-Key": key})

    def repeat(self, client: httpx.Client, firing: Sequence[IncidentAlert], now_ns: int) -> None:
        """People remember by themselves."""


class Alertmanager:
    """Pushes to the v2 API: an open incident fires until it is resolved.

    Alertmanager drops an alert whose end has passed, so each push says that it lasts for
    `lasting_seconds` more, and what still fires is pushed again before that.
    """

    name = "alertmanager"
    takes_incidents = True
    takes_actions = False

    def __init__(self, url: str, external_url: str | None, lasting_seconds: float) -> None:
        self._url = url.rstrip("/") + "/api/v2/alerts"
        self._external_url = external_url
        self._lasting_ns = int(lasting_seconds * 1e9)

    def deliver(self, client: httpx.Client, key: str, notice: Notice, now_ns: int) -> None:
        assert isinstance(notice, IncidentAlert), "actions are not routed here"
        alerts = [self._alert(notice, now_ns)]
        if notice.previous_severity is not None:
            # The severity is a label, so what fired under the old one is another alert: end it.
            alerts.append(self._alert(notice, now_ns, over_as=notice.previous_severity))
        _post(client, self._url, alerts, {})

    def repeat(self, client: httpx.Client, firing: Sequence[IncidentAlert], now_ns: int) -> None:
        if firing:
            _post(client, self._url, [self._alert(each, now_ns) for each in firing], {})

    def _alert(
        self, notice: IncidentAlert, now_ns: int, over_as: str | None = None
    ) -> dict[str, Any]:
        incident = notice.incident
        finding = incident.finding
        if over_as is not None:
            ends_ns = now_ns
        elif incident.resolved_ns is not None:
            ends_ns = incident.resolved_ns
        else:
            ends_ns = now_ns + self._lasting_ns
        alert = {
            "labels": {
                "alertname": f"Paceline{finding.kind.capitalize()}",
                "severity": over_as or finding.severity,
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
    found: list[Receiver] = []
    if settings.webhook_url is not None:
        found.append(Webhook("webhook", settings.webhook_url, incidents=True, actions=False))
    if settings.action_webhook_url is not None:
        url = settings.action_webhook_url
        found.append(Webhook("action-webhook", url, incidents=False, actions=True))
    if settings.chat_webhook_url is not None:
        found.append(Chat(settings.chat_webhook_url, settings.external_url))
    if settings.alertmanager_url is not None:
        # Three pushes may fail before an alert ends by itself.
        lasting = 4 * settings.alert_repeat_seconds
        found.append(Alertmanager(settings.alertmanager_url, settings.external_url, lasting))
    return found


def _page(external_url: str, notice: Notice) -> str:
    return f"{external_url.rstrip('/')}/jobs/{quote(notice.job_id, safe='')}"


def _post(client: httpx.Client, url: str, body: object, headers: dict[str, str]) -> None:
    """Only the status counts: what is said beyond it is not waited for."""
    content = msgspec.json.encode(body)
    headers = {"Content-Type": "application/json", **headers}
    try:
        with client.stream(
            "POST", url, content=content, headers=headers, timeout=_TIMEOUT_SECONDS
        ) as answer:
            pass
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DeliveryError(f"{type(error).__name__}: {error}") from error
    if answer.is_success:
        return
    detail = f"answered {answer.status_code}"
    if answer.next_request is not None:  # the rest of its address may be secret
        to = answer.next_request.url
        told = f"a redirect to {to.scheme}://{to.host}/...: give the address it leads to"
        raise RefusedError(f"{detail}, {told}")
    if not answer.is_server_error and answer.status_code not in _PASSING:
        raise RefusedError(detail)
    raise DeliveryError(detail, _seconds_until(answer.headers.get("Retry-After", "")))


def _seconds_until(retry_after: str) -> float:
    """Of a `Retry-After` (RFC 9110, 10.2.3): seconds, or a date; 0 if it is neither."""
    if retry_after.isascii() and retry_after.isdigit():
        return float(retry_after)
    try:
        return parsedate_to_datetime(retry_after).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0


def _time(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, UTC).isoformat()
