"""`paceline preflight` from its options to its exit status, with handwritten facts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from paceline_cli.main import main
from paceline_cli.preflight.launch import AllNodes, EachNode, RemoteCommands
from paceline_cli.preflight.survey import Survey, ask, forwarded
from tests.cli.preflight.test_checks import eth0, node

ROW = "1048576 262144 float sum -1 71.30 14.71 27.57 0 70.92 14.78 27.72 0\n"
TABLE = "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong\n" + ROW


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["preflight", *arguments])


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Facts of three nodes; the last one has a different MTU."""
    nodes = [node(0), node(1), eth0(mtu_bytes=1500.0)(node(2))]
    paths = [tmp_path / f"{each.node}.json" for each in nodes]
    for path, each in zip(paths, nodes, strict=True):
        path.write_bytes(msgspec.json.encode(each))
    return paths


def options(files: list[Path]) -> list[str]:
    return [word for path in files for word in ("--facts-file", str(path))]


def test_a_failed_check_ends_with_one_and_says_what_to_do(files: list[Path]) -> None:
    result = invoke(*options(files))
    assert result.exit_code == 1, result.output
    first, fix = result.output.splitlines()[:2]
    assert first.split() == ["fail", "MTU", "node-2:", "1500", "bytes;", "others", "9000", "bytes"]
    assert "ip link set dev" in fix


@pytest.mark.parametrize(
    ("stdout", "message"),
    [
        (">/dev/full", "not everything could be printed: No space left on device"),
        (">&-", "standard output is closed: there is nowhere to print to"),
    ],
)
@pytest.mark.parametrize("option", ["--facts", "--json", "--no-benchmarks"])
def test_a_stdout_that_cannot_be_written_is_one_sentence(
    files: list[Path], option: str, stdout: str, message: str
) -> None:
    command = [sys.executable, "-m", "paceline_cli", "preflight", option, *options(files)]
    shell = ["bash", "-c", f'"$@" {stdout}', "bash", *command]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"Error: {message}\n")


def test_nodes_that_are_alike_end_with_zero(files: list[Path]) -> None:
    assert invoke(*options(files[:2])).exit_code == 0


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server that returns nodes in the requested states at /api/v1/nodes."""
    items = [
        {"id": f"agent-{number}", "hostname": f"node-{number}", "state": state}
        for number, state in enumerate(request.param)
    ]

    class Nodes(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.startswith("/api/v1/nodes")
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps({"items": items, "next_cursor": None}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Nodes) as listening:
        thread = Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


@pytest.mark.parametrize("server", [("ready", "lost", "quarantined")], indirect=True)
def test_nodes_are_taken_from_the_server(server: str, files: list[Path]) -> None:
    there = f"sh -c 'cat {files[0].parent}/{{node}}.json'"
    result = invoke("--server", server, "--exec", there, "--no-benchmarks", "--json")
    document = json.loads(result.stdout)
    assert [each["node"] for each in document["nodes"]] == ["node-0", "node-2"]
    assert "agent-1 (node-1): not checked" in result.stderr
    assert document["verdict"] == "fail", "node-2 has an MTU of its own"


@pytest.mark.parametrize("server", [("lost",)], indirect=True)
def test_a_server_without_nodes_is_reported(server: str) -> None:
    result = invoke("--server", server)
    assert result.exit_code == 1
    assert "knows no live node" in result.stderr


def test_json_holds_checks_nodes_and_verdict(files: list[Path]) -> None:
    document = json.loads(invoke("--json", *options(files)).stdout)
    assert (document["schema"], document["verdict"]) == (1, "fail")
    assert sum(document["counts"].values()) == len(document["checks"])
    assert [each["node"] for each in document["nodes"]] == ["node-0", "node-1", "node-2"]
    (mtu,) = [check for check in document["checks"] if check["name"] == "MTU"]
    assert mtu["nodes"] == ["node-2"]


def test_output_of_nccl_tests_is_judged_too(files: list[Path], tmp_path: Path) -> None:
    good, bad = tmp_path / "good.log", tmp_path / "bad.log"
    good.write_text(TABLE)
    bad.write_text(TABLE.replace("27.57 0", "27.57 9"))
    assert invoke(*options(files[:2]), "--nccl-tests", str(good)).exit_code == 0
    result = invoke(*options(files[:2]), "--nccl-tests", str(good), "--nccl-tests", str(bad))
    assert result.exit_code == 1
    assert "bad.log: 9 wrong values" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nodes", "a,b", "--exec", "ssh"), "--exec needs {node}"),
        (("--nodes", "a", "--launcher", "srun"), "--launcher knows its nodes itself"),
        (("--nodes", ","), "--nodes takes names"),
        (("--nodes", "a,-oProxyCommand=b"), "a node's name does not begin with '-': -oProxyComm"),
        (("--launcher", " "), "--launcher takes a command"),
        (("--launcher", "srun 'x"), "--launcher: No closing quotation: srun 'x"),
        (("--nodes", "a", "--exec", "ssh '{node}"), "--exec: No closing quotation"),
        (("--nodes", "a", "--server", "http://localhost:1"), "--server knows the nodes"),
        (("--env", "NCCL_DEBUG"), "expected NAME=VALUE"),
        (("--patience", "nan"), "expected seconds, got nan"),
        (("--patience", "inf"), "inf is not in the range"),
        (("--nccl-tests", "/nonexistent"), "does not exist"),
    ],
)
def test_what_cannot_be_meant_ends_with_two(arguments: tuple[str, ...], words: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_a_file_that_is_no_text_holds_no_facts(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "core").write_bytes(b"\xff\xfe\x00{")
    result = invoke(*options([*files[:2], tmp_path / "core"]))
    assert result.exit_code == 1
    assert "core: holds no facts" in result.output


def test_a_missing_program_is_reported_in_one_sentence() -> None:
    result = invoke("--nodes", "a", "--exec", "no-such-program {node}", "--no-benchmarks")
    assert result.exit_code == 1
    assert "no-such-program" in result.output


def test_a_node_that_does_not_answer_fails_and_the_others_are_still_checked() -> None:
    document = msgspec.json.encode(node(0)).decode()
    script = f"import sys\nif sys.argv[1] == 'bad': sys.exit('no route')\nprint({document!r})"
    reach = EachNode(("good", "bad"), f"{sys.executable} -c {_quoted(script)} {{node}}")
    survey = ask(reach, ["facts"], RemoteCommands(), 20)
    assert [each.node for each in survey.nodes] == ["good"]
    assert survey.complaints == {"bad": "no route"}


def test_who_does_not_answer_in_time_is_ended_with_its_children() -> None:
    reach = EachNode(("slow",), "sh -c 'sleep 60 & wait'  {node}")
    survey = ask(reach, [], RemoteCommands(), 0.3)
    assert survey.complaints == {"slow": "no answer in time"}


def test_an_end_by_signal_meets_what_is_just_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    commands, started, start = RemoteCommands(), [], subprocess.Popen

    def interrupted(*args: Any, **kwargs: Any) -> subprocess.Popen[str]:
        started.append(start(*args, **kwargs))
        os.kill(os.getpid(), signal.SIGTERM)
        while not commands._interrupted:
            Event().wait(0.01)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        commands.run({"node": ["sleep", "60"]}, 60)
    assert [child.wait(30) for child in started] == [-signal.SIGKILL]


def test_a_launcher_reports_each_of_its_nodes_once() -> None:
    lines = [f"task: {msgspec.json.encode(node(number)).decode()}" for number in (1, 0, 1)]
    script = "print({!r})".format("\n".join(lines))
    survey = ask(AllNodes(f"{sys.executable} -c {_quoted(script)}"), [], RemoteCommands(), 20)
    assert [each.node for each in survey.nodes] == ["node-0", "node-1"]
    assert survey.complaints == {}


def test_a_clock_that_is_off_by_more_than_the_asking_took_is_named() -> None:
    second_ns = 10**9
    survey = Survey(
        ahead_ns={
            "quick": (-(10**7), 10**8),
            # took long to start, which does not mean that its clock is ahead
            "slow": (-(10**7), 9 * second_ns),
            "quick-too": (-(10**7), 10**8),
            "off": (5 * second_ns, 6 * second_ns),
        }
    )
    (check,) = [each for each in survey.checks() if each.name == "clocks alike"]
    assert (check.status, check.nodes) == ("fail", ["off"])
    assert "off: at least 5.0 s ahead" in check.evidence


def test_ssh_is_given_one_word_that_its_shell_reads_as_ours() -> None:
    command = EachNode(("n1",), "ssh {node}", quoted=True).command("n1", ["env", "A=b c", "x"])
    assert command == ["ssh", "n1", "env 'A=b c' x"]


def test_the_job_s_settings_are_handed_over_and_can_be_set() -> None:
    here = {"NCCL_DEBUG": "INFO", "HOME": "/root"}
    expected = ["env", "NCCL_DEBUG=INFO", "NCCL_IB_HCA=mlx5"]
    assert forwarded(here, {"NCCL_IB_HCA": "mlx5"}) == expected
    assert forwarded({}, {}) == []


def _quoted(script: str) -> str:
    """Return the script as a word of a template, with literal braces."""
    return "'" + script.replace("'", "'\"'\"'") + "'"
