"""Ranks have no privileges, and belong to an unprivileged user unless root was requested.

The tests start real agents as root, and read /proc of the ranks that they start.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline_agent.errors import SettingsError
from paceline_agent.supervise.rank_user import find_rank_user
from paceline_wire.batch import RankExited, RankStarted
from tests.agent.command_factory import start_ranks, stop

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root has privileges to lose")

Fixture = Callable[..., Any]
ROOT = Path(__file__).parents[3]
NOBODY = pwd.getpwnam("nobody")
STATUS = ["grep", "-E", "^(Uid|Gid|Groups|Cap|NoNew)", "/proc/self/status"]
NO_CAPABILITIES = dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), "0" * 16)


@pytest.fixture
def output_of(
    start_agent: Fixture, server: Any, order: Fixture, wait_for: Fixture, open_directory: Path
) -> Callable[..., str]:
    """Run a program as the only rank of an agent, and return what it printed."""

    def run(argv: list[str], *options: str, under: tuple[str, ...] = ()) -> str:
        start_agent("--node-directory", str(open_directory / "node"), *options, under=under)
        result = order(start_ranks("", argv=argv, directory="/"))
        assert result.ok, result.detail
        exited: RankExited = wait_for(lambda: server.events(RankExited))[0]
        assert exited.exit_code == 0, exited.log_tail
        return exited.log_tail

    return run


def fields(status: str) -> dict[str, str]:
    lines = (line.partition(":") for line in status.splitlines())
    return {name: value.strip() for name, _, value in lines}


@pytest.mark.parametrize("user", ["root", "nobody"])
def test_a_rank_has_no_capability_and_cannot_gain_one(output_of: Fixture, user: str) -> None:
    status = fields(output_of(STATUS, "--run-as", user))
    assert {name: status[name] for name in NO_CAPABILITIES} == NO_CAPABILITIES
    assert status["NoNewPrivs"] == "1"


def test_a_rank_of_a_root_without_setpcap_gains_nothing_either(output_of: Fixture) -> None:
    """Its bounding set cannot be emptied, and exec as root would restore all of it."""
    under = ("setpriv", "--bounding-set", "-setpcap", "--inh-caps", "-setpcap")
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    status = fields(output_of(STATUS, "--run-as", "root", under=under))
    assert status["CapBnd"] != "0" * 16
    assert (status["CapEff"], status["CapPrm"], status["NoNewPrivs"]) == ("0" * 16, "0" * 16, "1")


def test_a_rank_of_the_systemd_unit_does_not_inherit_its_capabilities(output_of: Fixture) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    given = "-all,+syslog,+sys_ptrace,+setuid,+setgid,+kill"
    ambient = ("--inh-caps", given, "--ambient-caps", given, "--bounding-set", given)
    status = fields(output_of(STATUS, "--run-as", "root", under=("setpriv", *ambient)))
    assert (status["CapEff"], status["CapAmb"], status["CapInh"]) == ("0" * 16,) * 3


def test_an_agent_that_is_not_root_runs_ranks_as_another_user_with_the_rights_of_the_unit(
    start_agent: Fixture, server: Any, order: Fixture, open_directory: Path
) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    unit = (ROOT / "deploy/systemd/paceline-agent.service").read_text()
    (names,) = re.findall(r"^AmbientCapabilities=(.*)$", unit, re.MULTILINE)
    given = ",".join(
        ["-all"]
        + [f"+{name.removeprefix('CAP_').lower()}" for name in names.split()]
        + ["+dac_read_search"]  # this Python may be readable by root only
    )
    user = ("--reuid", "60001", "--regid", "60001", "--clear-groups")
    rights = ("--inh-caps", given, "--ambient-caps", given, "--bounding-set", given)
    node = open_directory / "node"
    os.chown(open_directory, 60_001, 60_001)
    options = ("--node-directory", str(node), "--spool-directory", str(open_directory / "spool"))
    start_agent(*options, "--run-as", "nobody", under=("setpriv", *user, *rights))
    assert order(start_ranks("", argv=["sleep", "600"], directory="/")).ok
    (started,) = server.events(RankStarted)
    status = fields(Path(f"/proc/{started.pid}/status").read_text())
    assert set(status["Uid"].split()) == {str(NOBODY.pw_uid)}
    assert {name: status[name] for name in NO_CAPABILITIES} == NO_CAPABILITIES
    rings = (node / "rings").stat()
    assert (rings.st_uid, rings.st_gid, rings.st_mode & 0o7777) == (60_001, 60_001, 0o3777)
    assert order(stop(0)).ok, "it needs CAP_KILL"


def test_an_agent_that_is_root_runs_ranks_as_an_unprivileged_user(output_of: Fixture) -> None:
    expected = find_rank_user(None)
    assert expected.uid != 0
    status = fields(output_of(STATUS, "--run-as", expected.name))
    assert set(status["Uid"].split()) == {str(expected.uid)}
    assert set(status["Gid"].split()) == {str(expected.gid)}
    assert set(map(int, status["Groups"].split())) == set(expected.groups)


def test_the_default_user_is_the_job_account_else_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_agent.supervise.rank_user.ACCOUNT", "no-such-user")
    assert find_rank_user(None).name == "nobody"
    monkeypatch.setattr("paceline_agent.supervise.rank_user.ACCOUNT", "daemon")
    assert find_rank_user(None).name == "daemon"


def test_a_rank_of_another_user_has_the_home_of_that_user(output_of: Fixture) -> None:
    printed = output_of(["sh", "-c", "echo $HOME $USER $LOGNAME"], "--run-as", "nobody")
    assert printed.split() == [NOBODY.pw_dir, "nobody", "nobody"]


def test_a_rank_cannot_read_what_others_printed(output_of: Fixture, open_directory: Path) -> None:
    output_of(["true"], "--run-as", "nobody")
    (log,) = (open_directory / "node" / "logs").iterdir()
    assert (log.stat().st_uid, log.stat().st_mode & 0o777) == (0, 0o640)


def test_a_rank_of_another_user_is_stopped(
    start_agent: Fixture, server: Any, order: Fixture, wait_for: Fixture, open_directory: Path
) -> None:
    directory = open_directory / "node"
    agent = start_agent("--node-directory", str(directory), "--run-as", "nobody")
    assert order(start_ranks("", 2, argv=["sleep", "600"], directory="/")).ok
    assert agent.stop() == 0
    start_agent("--node-directory", str(directory), name="node-1")
    assert [event.signal for event in wait_for(lambda: server.events(RankExited))] == [15, 15]


@pytest.mark.parametrize("user", ["no-such-user", "4000000000"])
def test_a_user_that_does_not_exist_is_refused(start_agent: Fixture, user: str) -> None:
    agent = start_agent("--run-as", user)
    assert agent.process.wait(60) == 1
    assert f"the user '{user}' of --run-as does not exist on this node" in agent.log_text()


def test_an_agent_that_cannot_change_its_user_refuses_another(tmp_path: Path) -> None:
    code = (
        "import os\n"
        "from paceline_agent.supervise.rank_user import find_rank_user\n"
        "os.setuid(65534)\n"
        "assert find_rank_user(None).is_own\n"
        "find_rank_user('daemon')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert "SettingsError: this agent may not run ranks as daemon" in done.stderr


def test_an_agent_without_slots_needs_no_user(start_agent: Fixture, order: Fixture) -> None:
    start_agent("--slots", "0", "--run-as", "no-such-user")
    result = order(start_ranks("", ranks=1))
    assert "this node runs no ranks" in result.detail


def test_a_program_that_the_user_may_not_run_is_reported_with_the_user(
    start_agent: Fixture, order: Fixture, tmp_path: Path
) -> None:
    start_agent("--run-as", "nobody")
    program = tmp_path / "program"
    program.touch(0o700)
    result = order(start_ranks("", argv=[str(program)]))
    assert "Permission denied" in result.detail
    assert "ranks run as nobody, see --run-as" in result.detail


def test_root_is_an_explicit_choice() -> None:
    assert find_rank_user("root").is_own
    assert find_rank_user("0").uid == 0
    with pytest.raises(SettingsError, match="--run-as does not exist"):
        find_rank_user("")
