"""The user that ranks run as: never root unless it was requested."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path

from paceline_agent.errors import SettingsError

ACCOUNT = "paceline-job"  # default user, if it exists, of an agent that can change its user
NOBODY = "nobody"  # otherwise the default of an agent that runs as root
_CAP_SETGID, _CAP_SETUID = 6, 7


@dataclass(frozen=True, slots=True)
class RankUser:
    """A user by number, with its groups; `name` and `home` are for the ranks' environment."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    @property
    def is_own(self) -> bool:
        """Return whether the agent itself runs as this user."""
        return self.uid == os.geteuid()


def find_rank_user(name: str | None) -> RankUser:
    """Return the user with this name or number; None: the default on this node.

    The default of an agent that is root, or that may change its user as with the systemd unit, is
    the account `paceline-job` if it exists, otherwise `nobody` for root. Any other agent runs
    ranks as itself.

    Raises:
        SettingsError: the user does not exist, or the agent may not start processes as this user.
    """
    may_change = _may_change_user()
    if name is None:
        entry = _account(ACCOUNT) if may_change else None
        if entry is None and os.geteuid() == 0:
            entry = _account(NOBODY)
            if entry is None:
                raise SettingsError(
                    f"this agent is root and this node has neither the user {ACCOUNT} nor "
                    f"{NOBODY} to run ranks as: create one (useradd --system {ACCOUNT}), or name "
                    "a user with --run-as"
                )
        if entry is None:
            return _own()
    else:
        entry = _account(name)
        if entry is None:
            raise SettingsError(
                f"the user {name!r} of --run-as does not exist on this node; create it "
                f"(useradd --system {name}) or name another one"
            )
    if entry.pw_uid != os.geteuid() and not may_change:
        other = "--run-as root" if os.geteuid() == 0 else "no --run-as"
        raise SettingsError(
            f"this agent may not run ranks as {entry.pw_name}: it needs CAP_SETUID and "
            f"CAP_SETGID; or start it with {other}, or with --slots 0 to run no ranks"
        )
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return RankUser(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)


def _own() -> RankUser:
    return RankUser("", os.geteuid(), os.getegid(), tuple(os.getgroups()), "")


def _account(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    except (KeyError, OverflowError):
        return None


def _may_change_user() -> bool:
    """Return whether this process has both capabilities that a change of user and group needs."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return os.geteuid() == 0
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    return bool(effective >> _CAP_SETUID & 1 and effective >> _CAP_SETGID & 1)
