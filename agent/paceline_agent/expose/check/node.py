"""The agent's own environment: directories, server and clock."""

from __future__ import annotations

import email.utils
import os
import pwd
import stat
import time
from http import HTTPStatus
from pathlib import Path

from paceline_agent.collect import clock_sync
from paceline_agent.collect.cached_files import read_text_once
from paceline_agent.errors import LinkError, SettingsError
from paceline_agent.expose.check.report import NO, PARTLY, YES, CheckRow
from paceline_agent.forward.server_link import Target
from paceline_agent.settings import AgentSettings
from paceline_agent.supervise.rank_user import find_rank_user
from paceline_wire.node_directory import (
    ACCOUNT,
    MEMORY,
    PREFIX,
    RINGS,
    rings_of_running_agents,
)

_IN_MEMORY = {"tmpfs", "ramfs", "hugetlbfs"}
_RINGS_BYTES = 64 << 20  # size of the rings of eight ranks
_HEALTHY = b"ok"  # the server's response at /healthz
# smallest reported difference to the server's clock; its Date header has whole seconds
_WORTH_TELLING_SECONDS = 2.0
_MEBIBYTE = 1 << 20


def rings(settings: AgentSettings) -> CheckRow:
    what, directory = "ring directory", settings.directory
    place = _nearest(directory)
    remedy = "give another with --node-directory"
    if not os.access(place, os.W_OK | os.X_OK):
        return CheckRow(what, NO, f"{place} may not be written", remedy, needed=True)
    if _is_of_another_user(directory):
        found = f"{directory} is a link or belongs to another user"
        return CheckRow(what, NO, found, f"remove it, or {remedy}", needed=True)
    kind, free_bytes = file_system(place, settings.procfs_root), _free_bytes(place)
    found = f"{directory} on {kind or 'an unknown file system'}, {_mebibytes(free_bytes)} free"
    if free_bytes < _RINGS_BYTES:
        return CheckRow(what, PARTLY, found, "make it larger: mount -o remount,size=", needed=True)
    if kind not in _IN_MEMORY:
        remedy = "--node-directory on a tmpfs, or ranks wait for the disk"
        return CheckRow(what, PARTLY, found, remedy, needed=True)
    return CheckRow(what, YES, found, needed=True)


def rank_user(settings: AgentSettings) -> CheckRow:
    """Check the user that ranks run as.

    A user other than the agent's needs access to scripts and checkpoints.
    """
    what = "ranks run as"
    if settings.slots == 0:
        return CheckRow(what, YES, "this agent starts none (--slots 0)")
    try:
        user = find_rank_user(settings.run_as)
    except SettingsError as error:
        return CheckRow(what, NO, str(error), "see --run-as", needed=True)
    if user.uid == 0:
        remedy = "create the user paceline-job, or name another one with --run-as"
        return CheckRow(what, PARTLY, "root, without capabilities", remedy)
    return CheckRow(what, YES, user.name or "the agent's own user")


def found_by_ranks(settings: AgentSettings) -> CheckRow:
    """Check whether ranks of external jobs find this agent; its own ranks always do."""
    what, directory = "found by ranks", settings.directory
    others = [ring for ring in rings_of_running_agents() if ring.parent != directory]
    named = f"set PACELINE_RING_DIRECTORY={directory / RINGS} for them"
    if directory.parent != MEMORY or not directory.name.startswith(PREFIX):
        return CheckRow(what, NO, f"they look for {MEMORY}/{PREFIX}*, not {directory}", named)
    if others:
        return CheckRow(what, NO, f"another agent runs here, too: {others[0].parent}", named)
    account = _account()
    if account is None:
        return CheckRow(what, YES, "by those of all users")
    if account == ACCOUNT and _is_open(directory / RINGS):
        return CheckRow(what, YES, "by those of all users, as the systemd unit has it")
    return CheckRow(
        what, PARTLY, "by those of its own user only", "see deploy/README.md for others'"
    )


def _account() -> str | None:
    """Return the account of the agent; None for root, which serves all users."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name if os.geteuid() else None
    except KeyError:
        return ""


def _is_open(directory: Path) -> bool:
    try:
        return directory.stat().st_mode & 0o7777 == 0o3777
    except OSError:
        return False


def _is_of_another_user(directory: Path) -> bool:
    try:
        status = directory.lstat()
    except OSError:
        return False
    return status.st_uid not in (0, os.geteuid()) or not stat.S_ISDIR(status.st_mode)


def spool(settings: AgentSettings) -> CheckRow:
    what, directory = "spool directory", settings.spool
    place = _nearest(directory)
    if not os.access(place, os.W_OK | os.X_OK):
        remedy = "give another with --spool-directory"
        return CheckRow(what, NO, f"{place} may not be written", remedy, needed=True)
    kind, free_bytes = file_system(place, settings.procfs_root), _free_bytes(place)
    found = f"{directory} on {kind or 'an unknown file system'}, {_mebibytes(free_bytes)} free"
    if free_bytes < settings.spool_bytes:
        remedy = f"free {_mebibytes(settings.spool_bytes)}, or lower --spool-bytes"
        return CheckRow(what, PARTLY, found, remedy, needed=True)
    if kind in _IN_MEMORY:
        remedy = "--spool-directory on a disk, or what is not sent is lost at a reboot"
        return CheckRow(what, PARTLY, found, remedy, needed=True)
    return CheckRow(what, YES, found, needed=True)


def server(settings: AgentSettings) -> CheckRow:
    what, url = "server", settings.server_url
    try:
        target = Target(url, may_use_proxy=not settings.server_is_local, tls=settings.tls_context())
        answer = target.get("/healthz")
    except LinkError as error:
        found = f"{url} does not respond: {error}"
        return CheckRow(what, NO, found, "start it, or give another with --server", needed=True)
    if answer.status != HTTPStatus.OK:
        found = f"{url}/healthz responds with status {answer.status}"
        return CheckRow(what, NO, found, "check the server's log", needed=True)
    if answer.content.strip() != _HEALTHY:
        found = f"{url} responded but is not a Paceline server"
        return CheckRow(what, NO, found, "give the server's address with --server", needed=True)
    ahead = _ahead_seconds(answer.headers.get("date", ""))
    if ahead is not None and abs(ahead) > _WORTH_TELLING_SECONDS:
        found = f"{url} answers; this node's clock is {ahead:+.0f} s from its own"
        return CheckRow(what, PARTLY, found, "synchronize both clocks (chrony)", needed=True)
    return CheckRow(what, YES, f"{url} answers", needed=True)


def _ahead_seconds(date: str) -> float | None:
    try:
        return time.time() - email.utils.parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None


def clock() -> CheckRow:
    try:
        found = clock_sync.read()
    except OSError as error:
        remedy = "allow adjtimex in the sandbox's system call filter"
        return CheckRow("clock synchronization", NO, f"unknown: {error.strerror}", remedy)
    bound = f"off by at most {found.maximum_error_seconds * 1e3:.1f} ms"
    if found.is_synchronised:
        return CheckRow("clock synchronization", YES, f"synchronized, {bound}")
    remedy = "run chronyd, systemd-timesyncd or ptp4l on the node"
    return CheckRow("clock synchronization", NO, "the kernel says: not synchronized", remedy)


def file_system(path: Path, procfs: Path = Path("/proc")) -> str | None:
    """Return the type of a directory's file system: that of the longest mount point above."""
    try:
        lines = read_text_once(procfs / "self/mounts").splitlines()
    except OSError:
        return None
    resolved = path.resolve()
    mounts = [line.split()[1:3] for line in lines if len(line.split()) >= 3]
    above = [
        (len(point), position, kind)
        for position, (point, kind) in enumerate(mounts)
        if resolved.is_relative_to(point.replace("\\040", " "))
    ]
    # if two are mounted on one point, the later hides the other
    return max(above)[2] if above else None


def _nearest(directory: Path) -> Path:
    """Return the directory, or its nearest ancestor that exists and is accessible."""
    above = (directory, *directory.absolute().parents)
    return next(place for place in above if os.path.exists(place))  # False where stat is denied


def _free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _mebibytes(count: int) -> str:
    return f"{count // _MEBIBYTE} MiB"
