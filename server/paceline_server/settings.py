"""The server's settings, built once by the composition root and passed down in parts.

Each field is read from `PACELINE_SERVER_<NAME>` unless it is set on the command line.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from paceline_server.detect.kinds import Severity
from paceline_server.policy import Mode
from paceline_server.policy_file import load_policy
from paceline_wire.address import SERVER_PORT, is_http_address, is_local
from paceline_wire.local_token import state_directory

Role = Literal["all", "api", "worker"]
_MINIMUM = "Least severe incidents that this receiver gets."


def _check_http_url(url: str) -> str:
    if not is_http_address(url):
        # The rest of the URL may contain a secret.
        raise ValueError(
            f"expected http://HOST/... or https://HOST/..., got {url.split('/', 1)[0]}..."
        )
    return url


Address = Annotated[str, AfterValidator(_check_http_url)]


class Settings(BaseSettings):
    """Frozen settings. An invalid value raises pydantic.ValidationError before anything starts."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_SERVER_", frozen=True, extra="forbid")

    state_directory: Path = Field(
        default_factory=lambda: state_directory(os.environ),
        description="Directory of the tokens that programs of this user find by themselves.",
    )
    database_url: str = Field("sqlite:///paceline.db", description="URL of SQLite or PostgreSQL.")
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(
        SERVER_PORT, ge=0, le=65535, description="Port to listen on; 0: any free port."
    )
    tls_cert: Path | None = Field(None, description="Certificate (chain) to serve HTTPS with.")
    tls_key: Path | None = Field(None, description="Private key, if the certificate file has none.")
    tls_client_ca: Path | None = Field(
        None,
        description="CA certificates; each client must have a certificate signed by one of them.",
    )
    fd: int | None = Field(
        None, ge=0, description="File descriptor of a socket to listen on, on loopback."
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Additional host names of this server, for browsers and agents."
    )
    public_metrics: bool = Field(False, description="Serve /metrics to everyone without a token.")
    role: Role = Field("all", description="api: serve; worker: process jobs; all: both.")

    # "full" costs one fsync per group of batches; acknowledged batches survive a power cut.
    # With "normal" they survive only a crash of the process.
    sqlite_synchronous: Literal["normal", "full"] = "full"
    database_timeout_seconds: float = Field(5.0, gt=0, description="Database timeout.")

    policy: Path | None = Field(None, description="TOML file with defaults for new jobs.")
    launcher_mode: Mode = Field(
        "approve",
        description="Policy mode of jobs whose launcher is known: who decides.",
    )
    kubernetes_url: str | None = Field(
        None, description="URL of Kubernetes' API, for a server outside the cluster."
    )
    kubernetes_credentials: Path | None = Field(
        None, description="Directory with `token` and `ca.crt` of a service account, likewise."
    )

    lease_seconds: float = Field(3.0, gt=0, description="Lease of a worker on its jobs.")
    # Shortest interval between ticks, so that a burst of batches costs one tick. It is short
    # compared with the detection time of one second.
    tick_minimum_seconds: float = Field(0.1, gt=0)
    tick_seconds: float = Field(0.2, gt=0, description="Longest interval between ticks of a job.")
    batches_per_tick: int = Field(1024, ge=1, description="Batches read per tick.")
    bytes_per_tick: int = Field(16 << 20, ge=1, description="Compressed bytes read per tick.")

    log_retention_seconds: float = Field(900.0, gt=0, description="Age limit of the hot log.")
    log_retention_bytes: int = Field(1 << 30, ge=1 << 20, description="Size limit of the hot log.")
    kept_log_bytes: int = Field(
        1 << 30, ge=0, description="Size limit of the batches of ended jobs' last steps."
    )
    # Per job. A summary takes 1 to 3 KB, per-rank values take 20 bytes per rank and step. The
    # defaults hold a day at one step per second, and 20 MB per 1,000 ranks.
    steps_kept: int = Field(100_000, ge=1000, description="Newest steps stored per job.")
    step_shares_kept: int = Field(1000, ge=100, description="Newest steps with per-rank values.")
    step_retention_seconds: float = Field(
        7_776_000.0,
        gt=0,
        description="Age limit, after its end, of a job's steps; its incidents stay.",
    )
    changes_kept: int = Field(20_000, ge=100, description="Changes stored for resumed streams.")
    outbox_retention_seconds: float = Field(604_800.0, gt=0, description="Age limit of alerts.")
    command_retention_seconds: float = Field(
        604_800.0, gt=0, description="Age limit of done commands."
    )

    allow_local_receivers: bool = Field(
        False, description="Allow receivers of alerts at loopback and link-local addresses."
    )
    webhook_url: Address | None = Field(None, description="URL that receives incidents.")
    action_webhook_url: Address | None = Field(None, description="URL that receives actions.")
    chat_webhook_url: Address | None = Field(None, description="Webhook of a chat channel.")
    alertmanager_url: Address | None = Field(None, description="Base URL of an Alertmanager.")
    webhook_severity: Severity = Field("warning", description=_MINIMUM)
    chat_severity: Severity = Field("warning", description=_MINIMUM)
    alertmanager_severity: Severity = Field("warning", description=_MINIMUM)
    alert_repeat_seconds: float = Field(60.0, gt=0, description="Interval of repeated alerts.")
    external_url: Address | None = Field(None, description="URL of this server for users.")

    static_directory: Path | None = Field(None, description="Replaces the built-in dashboard.")

    @field_validator("webhook_url", "action_webhook_url", "chat_webhook_url", "alertmanager_url")
    @classmethod
    def _no_local_receiver(cls, url: str | None, info: ValidationInfo) -> str | None:
        host = urlsplit(url or "").hostname or ""
        if is_local(host) and not info.data.get("allow_local_receivers"):
            raise ValueError(
                f"expected no loopback or link-local address, got {host}; allow that with"
                " --allow-local-receivers"
            )
        return url

    @model_validator(mode="after")
    def _usable_certificates(self) -> Settings:
        self.tls_context()
        return self

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS context for HTTPS; None without a certificate.

        Raises:
            ValueError: a file cannot be used.
        """
        if self.tls_cert is None:
            if self.tls_key is not None or self.tls_client_ca is not None:
                raise ValueError("--tls-key and --tls-client-ca need --tls-cert")
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key)
        except OSError as error:  # SSLError too
            raise ValueError(
                f"cannot use the certificate {self.tls_cert} with the key"
                f" {self.tls_key or self.tls_cert}: {error}"
            ) from error
        if self.tls_client_ca is not None:
            try:
                context.load_verify_locations(self.tls_client_ca)
            except OSError as error:
                raise ValueError(f"cannot use {self.tls_client_ca}: {error}") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _split(cls, names: str | tuple[str, ...]) -> tuple[str, ...]:
        text = names if isinstance(names, str) else ",".join(names)
        return tuple(word.strip() for word in text.split(",") if word.strip())

    @field_validator("port", mode="before")
    @classmethod
    def _own_port(cls, port: object) -> object:
        # Kubernetes sets PACELINE_SERVER_PORT to tcp://ADDRESS:PORT of a Service `paceline-server`.
        is_of_service = isinstance(port, str) and port.startswith("tcp://")
        return SERVER_PORT if is_of_service else port

    @field_validator("policy")
    @classmethod
    def _valid_policy(cls, path: Path | None) -> Path | None:
        load_policy(path)  # PolicyError is a ValueError
        return path

    @field_validator("database_url")
    @classmethod
    def _supported_database(cls, url: str) -> str:
        scheme, separator, rest = url.partition("://")
        if scheme in ("postgresql", "postgres"):
            scheme = "postgresql+psycopg"
        normalized = f"{scheme}{separator}{rest}"
        if not _is_supported(normalized):
            raise ValueError(
                "expected sqlite:///PATH or postgresql://USER@HOST/NAME, "
                f"got {url.split(':', 1)[0]}:..."
            )
        return normalized


def _is_supported(url: str) -> bool:
    try:
        parts = make_url(url)
    except (ValueError, ArgumentError):  # an invalid port, or not a URL
        return False
    if parts.drivername == "sqlite":  # each connection would get its own in-memory database
        return parts.host is None and parts.database not in (None, "", ":memory:")
    return parts.drivername == "postgresql+psycopg"
