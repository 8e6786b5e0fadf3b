"""What an agent can be told. One frozen object, built once in `__main__`, passed down in parts."""

from __future__ import annotations

import ipaddress
import math
import os
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from paceline_agent.errors import SettingsError
from paceline_wire.node_directory import MEMORY, PREFIX

FLUSH_SECONDS = 0.5
HEARTBEAT_SECONDS = 1.0  # the server counts a node as lost after 5 s of silence
LEASE_SECONDS = 600.0
ORPHAN_GRACE_SECONDS = 10.0  # an init system starts a crashed agent anew well within it
SPOOL_BYTES = 64 << 20
METRICS_PORT = 9478
_PORT_AT_MOST = 65_535
HOSTNAME_LABEL = "Hostname"  # what the collectors write, and dcgm-exporter did for long
HOSTNAME_LABELS = (HOSTNAME_LABEL, "hostname")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Raises SettingsError for what cannot work.

    The lease: a server that has not heard of a node for some seconds starts its ranks elsewhere,
    so an agent that has not been able to reach the server for `lease_seconds` kills its own. Until
    then a zombie wastes its GPUs but harms nothing (its generation is in the process group's
    prefix and in each checkpoint), while a server that is down must not end every training: hence
    ten minutes. 0 turns it off.
    """

    server_url: str
    agent_id: str = field(default_factory=socket.gethostname)
    token: str | None = field(default=None, repr=False)
    node_directory: Path | None = None  # rings and logs; default: tmpfs
    spool_directory: Path | None = None  # default: `spool` below the state directory on disk
    slots: int | None = None  # ranks this node can hold; default: its GPUs, else 1
    address: str | None = None  # where other nodes reach rank 0
    sysfs_root: Path = Path("/sys")
    procfs_root: Path = Path("/proc")
    kmsg_path: Path = Path("/dev/kmsg")  # or a file with the like
    excluded_rdma: tuple[str, ...] = ()  # devices or ports that are never opened, see Context
    nccl_inspector_directory: Path | None = None  # besides those the ranks name
    flush_seconds: float = FLUSH_SECONDS
    spool_bytes: int = SPOOL_BYTES
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = METRICS_PORT  # 0: any free one; None: no metrics server
    hostname_label: str = HOSTNAME_LABEL  # on /metrics
    lease_seconds: float = LEASE_SECONDS
    orphan_grace_seconds: float = ORPHAN_GRACE_SECONDS  # that ranks outlive a killed agent
    labels: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict, repr=False)  # that ranks inherit

    def __post_init__(self) -> None:
        parts = urlsplit(self.server_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(
                f"the server's URL must look like http://HOST:PORT, got {self.server_url!r}"
            )
        if not 0 < len(self.agent_id) <= 128 or "/" in self.agent_id:
            raise SettingsError(
                f"the agent's id holds 1 to 128 characters and no '/', got {self.agent_id!r}"
            )
        if self.slots is not None and self.slots < 0:
            raise SettingsError(f"slots must be at least 0, got {self.slots}")
        if self.hostname_label not in HOSTNAME_LABELS:
            raise SettingsError(
                f"the hostname label is one of {', '.join(HOSTNAME_LABELS)}, "
                f"got {self.hostname_label!r}"
            )
        if not 0 < self.flush_seconds < math.inf:
            raise SettingsError(
                f"the flush interval must be positive and finite, got {self.flush_seconds}"
            )
        for name, seconds in (("lease", self.lease_seconds), ("grace", self.orphan_grace_seconds)):
            if not 0 <= seconds < math.inf:
                raise SettingsError(f"the {name} must be at least 0 and finite, got {seconds}")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= _PORT_AT_MOST:
            raise SettingsError(f"a port is 0 to {_PORT_AT_MOST}, got {self.metrics_port}")
        if self.spool_bytes < 1 << 16:
            raise SettingsError(f"the spool needs at least 64 KiB, got {self.spool_bytes} bytes")

    @property
    def directory(self) -> Path:
        """Rings, logs and the lock of this node; on tmpfs where there is one."""
        if self.node_directory is not None:
            return self.node_directory
        parent = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        return parent / f"{PREFIX}{self.agent_id}"

    @property
    def spool(self) -> Path:
        if self.spool_directory is not None:
            return self.spool_directory
        if self.node_directory is not None:
            return self.node_directory / "spool"
        state = Path("/var/lib") if os.access("/var/lib", os.W_OK) else Path.home() / ".local/state"
        return state / "paceline" / self.agent_id / "spool"

    @property
    def server_is_local(self) -> bool:
        host = urlsplit(self.server_url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    @property
    def reachable_address(self) -> str:
        if self.address is not None:
            return self.address
        return "127.0.0.1" if self.server_is_local else socket.gethostname()
