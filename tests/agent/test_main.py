"""The command `paceline agent`: valid and invalid options, and the end of its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from paceline_agent import __main__ as command
from paceline_agent.settings import AgentSettings
from paceline_wire.batch import AgentHello

Fixture = Callable[..., Any]


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AgentSettings]:
    """Return the settings that the command builds from its arguments."""
    calls: list[AgentSettings] = []
    monkeypatch.setattr(command, "run", lambda given: calls.append(given) or 0)

    def parse(*arguments: str, **environment: str) -> AgentSettings:
        result = CliRunner(env=environment).invoke(command.main, arguments)
        assert result.exit_code == 0, result.output
        return calls[-1]

    return parse


def test_flags_override_environment_overrides_file_overrides_defaults(
    settings: Callable[..., AgentSettings], tmp_path: Path
) -> None:
    file = tmp_path / "agent.toml"
    file.write_text('agent_id = "file"\nslots = 3\nspool_bytes = 1000000\n')
    given = settings(
        "--config",
        str(file),
        "--agent-id",
        "flag",
        PACELINE_AGENT_AGENT_ID="environment",
        PACELINE_AGENT_SLOTS="5",
    )
    assert (given.agent_id, given.slots, given.spool_bytes) == ("flag", 5, 1_000_000)
    assert given.lease_seconds == 600.0
    assert given.server_url == "http://127.0.0.1:8470"


def test_a_settings_file_uses_the_names_of_the_options(
    settings: Callable[..., AgentSettings], tmp_path: Path
) -> None:
    file = tmp_path / "agent.toml"
    lines = ('server = "https://a:1"', "spool-bytes = 1000000", 'label = ["rack=7"]')
    file.write_text("\n".join((*lines, 'exclude-rdma = "mlx5_1"')))
    given = settings("--config", str(file))
    assert (given.server_url, given.spool_bytes) == ("https://a:1", 1_000_000)
    assert given.labels == {"rack": "7"}
    assert given.excluded_rdma == ("mlx5_1",)


def test_a_variable_has_the_name_of_the_option_or_of_the_setting(
    settings: Callable[..., AgentSettings],
) -> None:
    for server, label, excluded in (
        ("SERVER", "LABEL", "EXCLUDE_RDMA"),
        ("SERVER_URL", "LABELS", "EXCLUDED_RDMA"),
    ):
        names = (server, label, excluded)
        values = ("https://a:1", "rack=7 row=2", "mlx5_1 mlx5_2")
        pairs = zip(names, values, strict=True)
        given = settings(**{f"PACELINE_AGENT_{name}": value for name, value in pairs})
        assert given.server_url == "https://a:1"
        assert given.labels == {"rack": "7", "row": "2"}
        assert given.excluded_rdma == ("mlx5_1", "mlx5_2")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"flush_secnds = 1\n", "contains unknown options: flush_secnds"),
        (b"[agent]\nslots = 1\n", "contains unknown options: agent"),
        (b"slots = [1]\n", "slots: expected text or a number, got [1]"),
        (b"[label]\nrack = 7\n", "label: expected text or a number, got {'rack': 7}"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_an_invalid_settings_file_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "agent.toml").write_bytes(content)
    result = CliRunner().invoke(command.main, ["--config", str(tmp_path / "agent.toml")])
    assert result.exit_code == 2
    assert message in result.output


def test_every_setting_can_be_given(settings: Callable[..., AgentSettings]) -> None:
    options = {option.name for option in command.main.params}
    fields = set(AgentSettings.__dataclass_fields__)
    assert fields - {"environment"} <= options
    assert settings("--no-metrics").metrics_port is None
    assert settings("--label", "rack=7").labels == {"rack": "7"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--server", "server:8470"], "must look like http://HOST:PORT"),
        (["--server", "http://server:8470"], "would not be encrypted"),
        (["--server", "https://server", "--tls-ca", "/none"], "cannot use the certificates /none"),
        (["--server", "https://server", "--tls-key", "/none"], "--tls-key needs --tls-cert"),
        (["--slots", "-1"], "slots must be at least 0"),
        (["--flush-seconds", "0"], "must be positive"),
        (["--flush-seconds", "nan"], "must be positive"),
        (["--lease-seconds", "inf"], "--lease-seconds must be at least 0 and finite"),
        (["--orphan-grace-seconds", "-1"], "--orphan-grace-seconds must be at least 0"),
        (["--metrics-port", "99999"], "--metrics-port must be in 0..65535"),
        (["--label", "rack"], "must look like NAME=VALUE"),
        (["--spool-bytes", "10"], "at least 64 KiB"),
        (["--agent-id", "a/b"], "no '/'"),
        (["--config", "/nonexistent"], "cannot be read"),
    ],
)
def test_an_invalid_option_ends_with_one_sentence(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(command.main, arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_the_token_is_not_shown() -> None:
    assert "secret" not in repr(AgentSettings(server_url="https://a", token="secret"))


def test_an_unusable_node_directory_ends_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    arguments = ["--node-directory", str(tmp_path / "file" / "x"), "--no-metrics"]
    ended = subprocess.run(
        [sys.executable, "-m", "paceline_agent", *arguments], capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "--node-directory" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_agent_ends_with_its_parent(
    server: Any, wait_for: Fixture, tmp_path: Path, is_alive: Fixture
) -> None:
    """The parent starts it from a thread that ends immediately, which must not end the agent."""
    program = (
        "import subprocess, sys, threading, time\n"
        "def start():\n"
        "    child = subprocess.Popen([sys.executable, '-m', 'paceline_agent', *sys.argv[1:]])\n"
        "    print(child.pid, flush=True)\n"
        "threading.Thread(target=start).start()\n"
        "time.sleep(600)\n"
    )
    arguments = ["--server", server.url, "--node-directory", str(tmp_path / "node")]
    arguments += ["--no-metrics", "--exit-with-parent"]
    parent = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    agent = int(parent.stdout.readline())
    wait_for(lambda: server.events(AgentHello))
    assert is_alive(agent)
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    wait_for(lambda: not is_alive(agent))


def test_a_parent_that_is_already_gone_ends_the_agent_at_once() -> None:
    arguments = ["--exit-with-parent", "1", "--no-metrics"]
    ended = subprocess.run(
        [sys.executable, "-m", "paceline_agent", *arguments], capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "has ended" in ended.stderr
