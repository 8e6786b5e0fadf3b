"""The agent's settings: one frozen object, built once in `__main__` and passed down in parts."""

from __future__ import annotations

import math
import os
import socket
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from paceline_agent.errors import SettingsError
from paceline_wire.address import is_loopback
from paceline_wire.node_directory import MEMORY, PREFIX

FLUSH_SECONDS = 0.5
HEARTBEAT_SECONDS = 1.0  # the server counts a node as lost after 5 s without a batch
LEASE_SECONDS = 600.0
ORPHAN_GRACE_SECONDS = 10.0  # an init system restarts a crashed agent well within this time
CHECKPOINT_SECONDS = 60.0  # less than the 90 s after which systemd kills the agent
SPOOL_BYTES = 64 << 20

# The ports that an agent opens; see docs/agent.md, "Ports the agent opens".
METRICS_HOST = "127.0.0.1"
METRICS_PORT = 9478  # /metrics, on METRICS_HOST
RENDEZVOUS_PORT = 0  # any free port: reserved for rank 0, which listens on it on all interfaces
_HIGHEST_PORT = 65_535

_STATE = Path("/var/lib/paceline")

HOSTNAME_LABEL = "Hostname"  # as the collectors and older dcgm-exporters write it
HOSTNAME_LABELS = (HOSTNAME_LABEL, "hostname")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """The settings of one agent.

    The lease: a server that loses contact with a node starts its ranks on another node after some
    seconds, so an agent that cannot reach the server for `lease_seconds` kills those ranks that
    have finished no operation for as long. Until then a leftover rank wastes its GPU but does no
    harm, because its generation is in the process group's prefix and in each checkpoint. A server
    that is down ends no training. 0 turns the lease off.

    Raises:
        SettingsError: a value is not valid.
    """

    server_url: str
    agent_id: str = field(default_factory=socket.gethostname)
    token: str | None = field(default=None, repr=False)
    tls_ca: Path | None = None  # CA certificates that verify the server's; default: the system's
    tls_cert: Path | None = None  # client certificate of this agent, if the server requires one
    tls_key: Path | None = None
    allow_plain_http: bool = False  # also allow it to a server that is not on this machine
    node_directory: Path | None = None  # rings and logs; default: on tmpfs
    spool_directory: Path | None = None  # default: below the state directory on disk
    run_as: str | None = None  # user of the ranks; default: see `find_rank_user`
    slots: int | None = None  # ranks this node can hold; default: its GPUs, else 1
    address: str | None = None  # address at which other nodes reach rank 0
    sysfs_root: Path = Path("/sys")
    procfs_root: Path = Path("/proc")
    kmsg_path: Path = Path("/dev/kmsg")  # or a file in the same format
    excluded_rdma: tuple[str, ...] = ()  # devices or ports that are never opened, see `Context`
    nccl_inspector_directory: Path | None = None  # in addition to the ranks' own settings
    flush_seconds: float = FLUSH_SECONDS
    spool_bytes: int = SPOOL_BYTES
    metrics_host: str = METRICS_HOST
    metrics_port: int | None = METRICS_PORT  # 0: any free port; None: no metrics server
    hostname_label: str = HOSTNAME_LABEL  # label name on /metrics
    lease_seconds: float = LEASE_SECONDS
    orphan_grace_seconds: float = ORPHAN_GRACE_SECONDS  # how long ranks outlive a killed agent
    # time for a checkpoint before the ranks are stopped
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    labels: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict, repr=False)  # inherited by the ranks

    def __post_init__(self) -> None:
        parts = urlsplit(self.server_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(
                f"--server must look like http://HOST:PORT, got {self.server_url!r}"
            )
        if parts.scheme == "http" and not self.server_is_local and not self.allow_plain_http:
            raise SettingsError(
                f"the connection to {self.server_url} would not be encrypted: others could read "
                "its token and the environments of jobs on the network. Use https:// (paceline "
                "server --tls-cert FILE --tls-key FILE), or give --allow-plain-http on a network "
                "that you trust"
            )
        self.tls_context()
        if not 0 < len(self.agent_id) <= 128 or "/" in self.agent_id:
            raise SettingsError(
                f"--agent-id must have 1 to 128 characters and no '/', got {self.agent_id!r}"
            )
        if self.slots is not None and self.slots < 0:
            raise SettingsError(f"--slots must be at least 0, got {self.slots}")
        if self.hostname_label not in HOSTNAME_LABELS:
            raise SettingsError(
                f"--hostname-label must be one of {', '.join(HOSTNAME_LABELS)}, "
                f"got {self.hostname_label!r}"
            )
        if not 0 < self.flush_seconds < math.inf:
            raise SettingsError(
                f"--flush-seconds must be positive and finite, got {self.flush_seconds}"
            )
        for name, seconds in (
            ("--lease-seconds", self.lease_seconds),
            ("--orphan-grace-seconds", self.orphan_grace_seconds),
            ("--checkpoint-seconds", self.checkpoint_seconds),
        ):
            if not 0 <= seconds < math.inf:
                raise SettingsError(f"{name} must be at least 0 and finite, got {seconds}")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= _HIGHEST_PORT:
            raise SettingsError(
                f"--metrics-port must be in 0..{_HIGHEST_PORT}, got {self.metrics_port}"
            )
        if self.spool_bytes < 1 << 16:
            raise SettingsError(
                f"--spool-bytes must be at least 64 KiB, got {self.spool_bytes} bytes"
            )

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS context; None if the server's URL is http.

        Raises:
            SettingsError: a file of certificates cannot be used.
        """
        if urlsplit(self.server_url).scheme != "https":
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca)
            if self.tls_cert is not None:
                context.load_cert_chain(self.tls_cert, self.tls_key)
        except OSError as error:  # SSLError too
            files = ", ".join(
                str(path) for path in (self.tls_ca, self.tls_cert, self.tls_key) if path
            )
            raise SettingsError(f"cannot use the certificates {files}: {error}") from error
        if self.tls_key is not None and self.tls_cert is None:
            raise SettingsError("--tls-key needs --tls-cert")
        return context

    @property
    def directory(self) -> Path:
        """The directory of this node's rings, logs and lock; on tmpfs if there is one."""
        if self.node_directory is not None:
            return self.node_directory
        parent = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        return parent / f"{PREFIX}{self.agent_id}"

    @property
    def spool(self) -> Path:
        """The directory of batches that have not been sent yet."""
        if self.spool_directory is not None:
            return self.spool_directory
        if self.node_directory is not None:
            return self.node_directory / "spool"
        # It exists where systemd or an image has created it for an agent that is not root.
        state = _STATE if _STATE.exists() else _STATE.parent
        if os.access(state, os.W_OK):
            return _STATE / self.agent_id / "spool"
        try:
            return Path.home() / ".local/state/paceline" / self.agent_id / "spool"
        except RuntimeError:  # no home directory, as in a container with any user id
            return self.directory / "spool"

    @property
    def server_is_local(self) -> bool:
        """Return whether the server is on this machine's loopback address."""
        return is_loopback(urlsplit(self.server_url).hostname or "")

    @property
    def reachable_address(self) -> str:
        """The address at which other nodes reach rank 0 on this node."""
        if self.address is not None:
            return self.address
        return "127.0.0.1" if self.server_is_local else socket.gethostname()
