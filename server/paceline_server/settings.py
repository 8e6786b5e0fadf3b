"""The server's settings: built once by the composition root, then handed down in parts.

Each field is read from `PACELINE_SERVER_<NAME>` unless the command line gives it.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from paceline_server.policy_file import load_policy
from paceline_wire.address import SERVER_PORT, is_http_address

Role = Literal["all", "api", "worker"]


def _reachable(url: str) -> str:
    if not is_http_address(url):
        # The rest of it may be secret.
        raise ValueError(
            f"expected http://HOST/... or https://HOST/..., got {url.split('/', 1)[0]}..."
        )
    return url


Address = Annotated[str, AfterValidator(_reachable)]


class Settings(BaseSettings):
    """Frozen; an invalid value raises pydantic.ValidationError before anything starts."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_SERVER_", frozen=True, extra="forbid")

    database_url: str = Field("sqlite:///paceline.db", description="SQLite or PostgreSQL.")
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(
        SERVER_PORT, ge=0, le=65535, description="Port to listen on; 0: any free one."
    )
    role: Role = Field("all", description="What this process does: serve, work on jobs, or both.")

    # Full costs one fsync per group of batches, and keeps what was acknowledged through a power
    # cut; "normal" keeps it only through the death of the process.
    sqlite_synchronous: Literal["normal", "full"] = "full"
    database_timeout_seconds: float = Field(5.0, gt=0, description="Longest wait for the database.")

    policy: Path | None = Field(None, description="TOML file with defaults for new jobs.")

    lease_seconds: float = Field(3.0, gt=0, description="A silent worker loses its jobs after.")
    # Ticks are at least this far apart, so that a burst of batches costs one pass; detection in
    # a second leaves room for it.
    tick_minimum_seconds: float = Field(0.1, gt=0)
    tick_seconds: float = Field(0.2, gt=0, description="Longest pause between two looks at a job.")
    batches_per_tick: int = Field(1024, ge=1, description="Read from the log at once.")
    bytes_per_tick: int = Field(16 << 20, ge=1, description="Of these, at most so many bytes.")

    log_retention_seconds: float = Field(900.0, gt=0, description="Hot log kept for rebuilding.")
    log_retention_bytes: int = Field(1 << 30, ge=1 << 20)
    # Of each job. A summary takes one to three KB, a share 20 bytes for each rank: these defaults
    # are a day of a step a second, and 20 MB for each 1,000 ranks.
    steps_kept: int = Field(100_000, ge=1000, description="Newest steps of which a job tells.")
    step_shares_kept: int = Field(1000, ge=100, description="Newest steps told rank by rank.")
    changes_kept: int = Field(20_000, ge=100, description="For clients that resume a stream.")
    outbox_retention_seconds: float = Field(604_800.0, gt=0, description="Alerts, heard or not.")
    command_retention_seconds: float = Field(604_800.0, gt=0, description="Of finished ones.")

    webhook_url: Address | None = Field(None, description="Where incidents are posted.")
    action_webhook_url: Address | None = Field(None, description="Where actions are posted.")
    chat_webhook_url: Address | None = Field(None, description="Of a channel that hears of both.")
    alertmanager_url: Address | None = Field(None, description="Base URL of an Alertmanager.")
    alert_repeat_seconds: float = Field(60.0, gt=0, description="Firing alerts are pushed again.")
    external_url: Address | None = Field(None, description="How people reach this server.")

    static_directory: Path | None = Field(None, description="Other assets than the built-in.")

    @field_validator("policy")
    @classmethod
    def _valid_policy(cls, path: Path | None) -> Path | None:
        load_policy(path)  # PolicyError is a ValueError
        return path

    @field_validator("database_url")
    @classmethod
    def _known_database(cls, url: str) -> str:
        scheme, separator, rest = url.partition("://")
        if scheme in ("postgresql", "postgres"):
            scheme = "postgresql+psycopg"
        known = f"{scheme}{separator}{rest}"
        if not _is_database(known):
            raise ValueError(
                "expected sqlite:///PATH or postgresql://USER@HOST/NAME, "
                f"got {url.split(':', 1)[0]}:..."
            )
        return known


def _is_database(url: str) -> bool:
    try:
        parts = make_url(url)
    except (ValueError, ArgumentError):  # a port that is no number, no URL at all
        return False
    if parts.drivername == "sqlite":  # in memory each connection would have its own
        return parts.host is None and parts.database not in (None, "", ":memory:")
    return parts.drivername == "postgresql+psycopg"


def is_loopback(host: str) -> bool:
    """True if nobody but this machine can reach `host`. Names other than localhost are not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
