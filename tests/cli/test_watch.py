"""`paceline watch`: the command runs as if it were started alone, and is recorded."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline_autostart import result
from paceline_cli import companions, watched
from paceline_cli.commands import watch as command
from paceline_cli.companions import LINGER_SECONDS
from paceline_cli.watch_directory import WANTED
from paceline_wire.node_directory import MEMORY, RINGS, is_in_use
from tests.ports import free_port

TRAINING = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
with open(sys.argv[1], "a") as ready:
    ready.write("rank\\n")
for _ in range(600):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Path]:
    """The directory of an agent that only this test starts."""
    directory = MEMORY / f"paceline-test-{os.getpid()}-{tmp_path.name}"
    yield directory
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    directory.rmdir() if directory.exists() else None


def environment(tmp_path: Path, **settings: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE")}
    return inherited | {"PACELINE_STATE_DIRECTORY": str(tmp_path / "state")} | settings


def watch(*arguments: str, tmp_path: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline_cli", "watch", *arguments],
        env=environment(tmp_path, **settings),
        capture_output=True,
        text=True,
        timeout=150,
    )


def responds(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", timeout=60).is_success
    except httpx.HTTPError:
        return False


def wait_until_ended(node: Path) -> None:
    deadline = time.monotonic() + 60
    while is_in_use(node):
        assert time.monotonic() < deadline, "the agent still runs"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("command", "status", "printed"),
    [
        ("echo out; echo err >&2; exit 7", 7, "out\n"),
        ("kill -TERM $$", -signal.SIGTERM, ""),
        ("echo $PACELINE $PACELINE_RING_DIRECTORY", 0, "1 /given/rings\n"),
        ("grep SigIgn /proc/self/status", 0, None),
    ],
)
def test_status_output_and_signals_are_those_of_the_command(
    tmp_path: Path, command: str, status: int, printed: str | None
) -> None:
    if printed is None:  # as without Paceline
        printed = subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout
    finished = watch(
        *("--", "sh", "-c", command), tmp_path=tmp_path, PACELINE_RING_DIRECTORY="/given/rings"
    )
    assert (finished.returncode, finished.stdout) == (status, printed)
    own, *others = finished.stderr.splitlines()
    assert own == "paceline: recorded by the agent with the rings /given/rings"
    assert others == (["err"] if "err" in command else [])


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"PACELINE_RING_DIRECTORY": ""}, "PACELINE_RING_DIRECTORY is empty"),
        (
            {"PACELINE_RING_DIRECTORY": "/r", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            "loads no plug-ins",
        ),
        ({"PACELINE_AGENT_NODE_DIRECTORY": "/proc/nowhere"}, "/proc/nowhere"),
        (
            {"PACELINE_STATE_DIRECTORY": "", "XDG_STATE_HOME": "", "HOME": "~"},
            "has no home directory: name a directory with PACELINE_STATE_DIRECTORY",
        ),
        (
            {"PACELINE_STATE_DIRECTORY": "/proc/nowhere"},
            "/proc/nowhere: No such file or directory; name another directory with PACELINE_STATE",
        ),
    ],
)
def test_a_command_that_cannot_be_recorded_runs_all_the_same(
    tmp_path: Path, settings: dict[str, str], line: str
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    settings = {"PACELINE_AGENT_NODE_DIRECTORY": str(tmp_path / "no agent"), **settings}
    finished = watch("--server", url, "--", "echo", "trained", tmp_path=tmp_path, **settings)
    assert (finished.returncode, finished.stdout) == (0, "trained\n")
    assert "paceline: not recorded: " in finished.stderr
    assert line in finished.stderr


def test_one_of_several_agents_has_to_be_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_STATE_DIRECTORY", str(tmp_path))
    rings = [Path("/one/rings"), Path("/other/rings")]
    monkeypatch.setattr(command, "rings_of_running_agents", lambda: rings)
    with pytest.raises(command.NotRecordedError, match=r"2 .*PACELINE_RING_DIRECTORY=/one/"):
        command._prepare({}, "http://127.0.0.1:9", None, chosen=True)
    chosen = {"PACELINE_RING_DIRECTORY": "/other/rings"}
    assert "/other/rings" in command._prepare(chosen, "http://127.0.0.1:9", None, chosen=True)


def test_a_user_without_a_home_directory_is_recorded_by_an_agent_that_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("PACELINE_STATE_DIRECTORY", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", "~")
    monkeypatch.setattr(command, "rings_of_running_agents", lambda: [Path("/node-1/rings")])
    shown = command._prepare({}, "http://127.0.0.1:9", None, chosen=True)
    assert shown.startswith("recorded by the agent of this node, node-1;")


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of what is launched on this node, where no agent runs yet."""
    arguments_of: list[list[str]] = []

    def launch(arguments: list[str], _: dict[str, str], __: int) -> int:
        arguments_of.append(arguments)
        read, write = os.pipe()
        os.write(write, b"ready\n")
        os.close(write)
        return read

    monkeypatch.setenv("PACELINE_STATE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(command, "rings_of_running_agents", list)
    monkeypatch.setattr(companions, "launch", launch)
    return arguments_of


@contextmanager
def serving(answer: Callable[[str, str | None], tuple[int, object]]) -> Iterator[str]:
    """Serve what `answer` returns for a path and the authorization: status and JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = answer(self.path, self.headers["Authorization"])
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("ended", [True, False])
def test_a_server_that_has_not_found_out_how_a_job_ended_is_behind(
    tmp_path: Path, ended: bool
) -> None:
    """Then it runs longer than the command: steps of milliseconds take it as long as the job."""
    now = datetime.now(UTC)
    job = {
        "id": "train",
        "name": "train.py",
        "verdict": {"kind": "failed", "text": "Failed."},
        "created_at": now.isoformat(),
        "finished_at": now.isoformat() if ended else None,
    }

    def answer(path: str, _: str | None) -> tuple[int, object]:
        return 200, {"items": [job] if path.startswith("/api/v1/jobs") else []}

    with serving(answer) as url:
        assert watched.write(tmp_path, url, now) is ended
    [problem] = json.loads((tmp_path / "result.json").read_text())["problems"]
    assert problem["ended"] is ended
    assert not watched.write(tmp_path, f"http://127.0.0.1:{free_port()}", now)


@pytest.mark.parametrize(
    ("token", "status", "is_used"),
    [("known", 200, True), ("an agent's", 403, True), ("unknown", 401, False), (None, 200, False)],
)
def test_a_server_of_this_machine_is_used_if_it_accepts_this_user(
    launched: list[list[str]], token: str | None, status: int, is_used: bool
) -> None:
    """Another user's server would refuse all data."""

    def answer(path: str, authorization: str | None) -> tuple[int, object]:
        assert (path, authorization) == ("/api/v1/caller", f"Bearer {token}")
        return status, {}

    with serving(answer) as url:
        shown = command._prepare({}, url, token, chosen=False)
    assert (f"dashboard: {url} (an agent runs" in shown) == is_used
    assert ("--database-url" in launched[0]) != is_used


def test_nodes_with_one_home_directory_share_neither_commands_nor_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: list[list[str]]
) -> None:
    for host in ("node-1", "node-2"):
        monkeypatch.setattr(
            "paceline_cli.watch_directory.socket.gethostname", lambda host=host: host
        )
        command._prepare({}, "http://127.0.0.1:9", None, chosen=True)
    one, other = ({word for word in words if str(tmp_path) in word} for words in launched)
    assert len(one) == 2, "the directory and the spool"
    assert not one & other
    registered = {path.parent for path in tmp_path.rglob(str(os.getpid()))}
    assert len(registered) == 2


@pytest.mark.parametrize(
    ("options", "given", "expected"),
    [
        (["--max-restarts=3"], {}, "1"),
        (["--max_restarts", "3"], {}, "1"),
        ([], {"PET_MAX_RESTARTS": "3"}, "1"),
        (["--max-restarts=3"], {command.OWN_STORE: "0"}, "0"),
        (["--nproc-per-node=2"], {}, ""),
    ],
)
def test_ranks_that_torchrun_starts_again_get_a_store_of_their_own(
    tmp_path: Path, options: list[str], given: dict[str, str], expected: str
) -> None:
    settings = {"PACELINE_RING_DIRECTORY": "/given/rings"} | given
    show = f'printf "%s" "${command.OWN_STORE}"'
    done = watch("--", "sh", "-c", show, "torchrun", *options, tmp_path=tmp_path, **settings)
    assert done.stdout == expected
    assert (command.OWN_STORE in done.stderr) == (expected == "1")


def test_a_program_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    finished = watch("--", "no-such-program", tmp_path=tmp_path)
    assert (finished.returncode, finished.stdout) == (1, "")
    assert finished.stderr == "Error: there is no program 'no-such-program'\n"


def test_options_after_the_command_are_its_own(tmp_path: Path) -> None:
    finished = watch(
        *("sh", "-c", "echo $0 $*", "--server", "x", "--json"),
        tmp_path=tmp_path,
        PACELINE_RING_DIRECTORY="/given/rings",
    )
    assert (finished.returncode, finished.stdout) == (0, "--server x --json\n"), finished.stderr


def last_words(tmp_path: Path, program: str) -> str:
    """Return what a shell script that runs this program prints to stderr."""
    path = tmp_path / "result.json"
    problem = {"job": "train", "created": time.time() + 60.0, "lines": ["Rank 1 is \x1b[31mslow."]}
    earlier = {"job": "earlier", "created": time.time() - 60.0, "lines": ["Rank 7 is slow."]}
    path.write_text(json.dumps({"problems": [problem, earlier]}))
    later = time.time() + 3600.0  # it stays new, however long the import of torch takes
    os.utime(path, (later, later))
    finished = subprocess.run(
        ["sh", "-c", f"{sys.executable} -c '{program}'; true"],
        env=environment(tmp_path, PACELINE="1", **{watched.VARIABLE: str(path)}),
        capture_output=True,
        text=True,
        timeout=150,
    )
    return finished.stderr


def test_the_command_ends_with_what_was_found(tmp_path: Path) -> None:
    found = (
        "paceline: Rank 1 is ?[31mslow.\n"
        "paceline: `paceline watch` shows what was found in this training\n"
    )
    starts_others = (
        "import os, subprocess, sys, torch\n"
        "if os.fork() == 0: raise SystemExit\n"
        'os.wait(); subprocess.run([sys.executable, "-c", "import torch"])\n'
        "os.environ.clear()"
    )
    assert last_words(tmp_path, starts_others) == found
    failed = last_words(tmp_path, "import torch; raise ValueError(7)")
    assert failed.startswith("Traceback")
    assert failed.endswith(found)


@pytest.mark.parametrize(
    ("content", "age_seconds"),
    [
        (None, 0.0),
        ("[]", 0.0),
        ("{", 0.0),
        ('{"problems": []}', 0.0),
        ('{"problems": [{"created": 9, "lines": [7]}]}', 0.0),
        ('{"problems": [{"created": 9, "lines": ["slow"]}]}', 60.0),
    ],
)
def test_a_result_that_is_missing_damaged_or_old_is_not_printed(
    tmp_path: Path, content: str | None, age_seconds: float, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    if content is not None:
        path.write_text(content)
        at = time.time() - age_seconds
        os.utime(path, (at, at))
    result.show(str(path), os.getpid(), 0.0)
    assert capsys.readouterr().err == ""


def test_problems_of_several_jobs_have_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    jobs = [{"job": name, "created": 9, "lines": [f"{name} hangs."]} for name in ("one", "two")]
    path.write_text(json.dumps({"problems": jobs}))
    result.show(str(path), os.getpid(), 5.0)
    assert capsys.readouterr().err.startswith("paceline: one: one hangs.\npaceline: two: two")


def a_job(**problems: Any) -> dict[str, Any]:
    """Return a job of a result that began after the command."""
    return {"job": "train", "created": time.time() + 60.0, "lines": []} | problems


def ending(path: Path, error: str, server: str | None = None) -> subprocess.Popen[str]:
    """Start a command with this result, or an external server, which the error ends."""
    program = f"import sys; sys.last_value = {error}; from paceline_autostart import result; "
    return subprocess.Popen(
        [sys.executable, "-c", program + "result.show_at_exit(lambda: False)"],
        env=environment(path.parent, **{watched.VARIABLE: server or str(path)}),
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("error", ["ValueError(7)", "KeyboardInterrupt()"])
def test_a_command_that_an_error_ends_waits_for_the_reason(tmp_path: Path, error: str) -> None:
    """torchrun ends within a second after its rank, when the result of five seconds ago is old."""
    path, wanted = tmp_path / "result.json", tmp_path / WANTED
    job = a_job(ended=False)
    path.write_text(json.dumps({"problems": [job]}))
    with ending(path, error) as command:
        while command.poll() is None and not wanted.exists():
            time.sleep(0.01)
        assert wanted.exists() == (error != "KeyboardInterrupt()")
        path.write_text(
            json.dumps({"problems": [{**job, "ended": True, "lines": ["Rank 1 failed."]}]})
        )
        _, words = command.communicate(timeout=60)
    assert words.startswith("paceline: Rank 1 failed.\n") == wanted.exists()


def last_words_of(tmp_path: Path, error: str, *results: list[dict[str, Any]]) -> str:
    """Return the last words of a command that this error ends, which reads these results in turn.

    The last one is written each time that another one is asked for.
    """
    path, wanted = tmp_path / "result.json", tmp_path / WANTED
    left = list(results)
    with ending(path, error) as command:
        while command.poll() is None:
            if wanted.exists():
                wanted.unlink()
                path.write_text(json.dumps({"problems": left[0]}))
                left = left[1:] or left
            time.sleep(0.01)
        _, words = command.communicate(timeout=60)
    return words


def test_ranks_that_fail_while_the_server_starts_are_awaited(tmp_path: Path) -> None:
    """A rank may fail to import a module before there is a result of any training."""
    failed = a_job(ended=True, lines=["Rank 1 failed."])
    words = last_words_of(tmp_path, 'type("", (Exception,), {"failures": {}})()', [], [failed])
    assert words.startswith("paceline: Rank 1 failed.\n")


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_command_without_a_training_says_so(tmp_path: Path, is_recorded: bool) -> None:
    """The result that is a second old need not have a training that has just begun."""
    (tmp_path / "result.json").write_text(json.dumps({"problems": []}))
    words = last_words_of(tmp_path, "None", [a_job(ended=False)] * is_recorded)
    assert words.startswith("paceline: no training was recorded: ") != is_recorded
    assert len(words.splitlines()) == 1


def test_the_last_lines_say_so_if_the_reason_is_not_known_in_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    job = {"job": "train", "created": 9, "ended": False, "lines": ["Rank 1 is slow."]}
    path.write_text(json.dumps({"problems": [job]}))
    monkeypatch.setattr(result, "_END_SECONDS", 0.3)
    monkeypatch.setattr(sys, "last_value", ValueError(7), raising=False)
    result._show_at_exit(str(path), os.getpid(), 0.0, lambda: False)
    assert capsys.readouterr().err == (
        "paceline: Rank 1 is slow.\n"
        "paceline: why it ended is not known yet: ask `paceline watch` again in a minute\n"
    )


def test_only_one_task_of_a_job_step_prints_the_result(tmp_path: Path, node: Path) -> None:
    """An external server keeps no result on this node: its address is printed."""
    url = f"http://127.0.0.1:{free_port()}"
    for task, printed in (("0", f"{url}\n"), ("3", "\n")):
        finished = watch(
            *("--", "sh", "-c", f"echo ${watched.VARIABLE}"),
            tmp_path=tmp_path,
            PACELINE_AGENT_NODE_DIRECTORY=str(node),
            PACELINE_SERVER=url,
            SLURM_PROCID=task,
        )
        assert finished.stdout == printed, finished.stderr
    wait_until_ended(node)


@pytest.mark.parametrize(
    ("error", "printed"),
    [
        ('type("", (Exception,), {"failures": {}})()', "paceline: https://HOST shows why it ended"),
        ("KeyboardInterrupt()", ""),
        ("None", ""),
    ],
)
def test_torchrun_prints_the_address_of_an_external_server(
    tmp_path: Path, error: str, printed: str
) -> None:
    with ending(tmp_path / "result.json", error, "https://HOST") as command:
        _, words = command.communicate(timeout=60)
    assert words.strip() == printed


def test_an_option_that_does_not_exist_is_no_program(tmp_path: Path) -> None:
    finished = watch("--port", "8471", "--", "true", tmp_path=tmp_path)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert "No such option" in finished.stderr
    assert "--port" in finished.stderr


def test_no_descriptor_of_the_command_is_held_until_the_agent_ends(tmp_path: Path) -> None:
    """A lock or a pipe of a calling script is free when the command has ended."""
    read, write = os.pipe()
    os.set_inheritable(write, True)
    agent = ["sh", "-c", f"until test -e {tmp_path / 'end'}; do sleep 0.1; done"]
    report = companions.launch(
        [str(tmp_path / "node"), str(tmp_path), "", "0", *agent, "--"], dict(os.environ)
    )
    os.close(write)
    try:
        assert select.select([read], [], [], 10.0)[0], "the pipe is still open"
    finally:
        (tmp_path / "end").touch()
        with open(report) as lines:
            assert "the agent ended with status 0" in lines.read()
        os.close(read)


def test_an_agent_runs_as_long_as_the_command(tmp_path: Path, node: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    check = f"test $PACELINE_RING_DIRECTORY = {node / RINGS} && test -d {node / RINGS} && echo on"
    finished = watch(
        *("--server", url, "--", "sh", "-c", check),
        tmp_path=tmp_path,
        PACELINE_AGENT_NODE_DIRECTORY=str(node),
    )
    assert (finished.returncode, finished.stdout) == (0, "on\n"), finished.stderr
    assert (
        finished.stderr == f"paceline: dashboard: {url} (an agent runs until the training ends)\n"
    )
    wait_until_ended(node)


def test_an_agent_runs_until_the_last_command_has_ended(tmp_path: Path, node: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"

    def start(go_on: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "paceline_cli", "watch", "--server", url, "--"]
        return subprocess.Popen(
            [*command, "sh", "-c", f"until test -e {go_on}; do sleep 0.1; done; exit 7"],
            env=environment(tmp_path, PACELINE_AGENT_NODE_DIRECTORY=str(node)),
            stderr=subprocess.PIPE,
            text=True,
        )

    with start(tmp_path / "first") as first, start(tmp_path / "second") as second:
        assert first.stderr is not None
        assert second.stderr is not None
        own = f"dashboard: {url} (an agent runs until the training ends)"
        found = f"recorded by the agent of this node, {node.name}; dashboard: {url}"
        lines = {first.stderr.readline(), second.stderr.readline()}
        assert lines == {f"paceline: {own}\n", f"paceline: {found}\n"}
        (tmp_path / "first").touch()
        assert first.wait(60) == 7
        time.sleep(LINGER_SECONDS + 3.0)  # the agent would have ended
        assert is_in_use(node)
        (tmp_path / "second").touch()
        assert second.wait(60) == 7
    wait_until_ended(node)


def test_two_users_who_begin_at_the_same_time_have_a_server_each(
    tmp_path: Path, node: Path
) -> None:
    words = [sys.executable, "-m", "paceline_cli", "watch", "--"]

    def start(user: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*words, "sh", "-c", f"echo ${watched.VARIABLE}; cat"],
            env=environment(tmp_path / user, PACELINE_AGENT_NODE_DIRECTORY=str(node / user)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    node.mkdir()
    users = ["one", "other"]
    with start(users[0]) as one, start(users[1]) as other:
        addresses = []
        for user, process in zip(users, (one, other), strict=True):
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line.startswith("paceline: dashboard: http://127.0.0.1:"), line
            addresses.append(line.split()[2])
            token = tmp_path / user / "state" / "operator-token"
            while not token.exists():  # the server has begun
                time.sleep(0.1)
            headers = {"Authorization": f"Bearer {token.read_text().strip()}"}
            answer = httpx.get(f"{addresses[-1]}/api/v1/caller", headers=headers, timeout=60)
            assert answer.status_code == 200, "the server of another user"
        assert len(set(addresses)) == 2
        results = [Path(process.communicate("")[0].strip()) for process in (one, other)]
        assert [path.relative_to(tmp_path).parts[0] for path in results] == users
    for user in users:
        wait_until_ended(node / user)


@pytest.mark.campaign
def test_a_training_is_shown_and_everything_ends_with_it(tmp_path: Path, node: Path) -> None:
    """SIGTERM reaches torchrun, which ends its ranks; then agent and server end."""
    script, ready = tmp_path / "train.py", tmp_path / "ready"
    script.write_text(TRAINING)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "paceline_cli", "watch", "--", sys.executable, "-m"),
            *("torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"),
            *(str(script), str(ready)),
        ],
        env=environment(tmp_path, PACELINE_AGENT_NODE_DIRECTORY=str(node)),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("paceline: dashboard: http://127.0.0.1:"), line
    url = line.split()[2]
    jobs: list[dict[str, str]] = []
    deadline = time.monotonic() + 120
    while not jobs and time.monotonic() < deadline:
        time.sleep(0.5)
        try:
            jobs = httpx.get(f"{url}/api/v1/jobs", timeout=60).json()["items"]
        except httpx.HTTPError:
            continue
    (logs,) = (tmp_path / "state/watch").iterdir()
    while not json.loads(watch("--json", tmp_path=tmp_path).stdout)["jobs"]:
        assert time.monotonic() < deadline, list(logs.iterdir())
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert [job["name"] for job in jobs] == ["train.py"], errors
    assert errors.endswith("`paceline watch` shows what was found in this training\n"), errors
    wait_until_ended(node)
    deadline = time.monotonic() + 30
    while responds(url):
        assert time.monotonic() < deadline, "the server still runs"
        time.sleep(0.1)
    kept = json.loads(watch("--json", tmp_path=tmp_path).stdout)
    assert [(job["name"], job["state"]) for job in kept["jobs"]] == [("train.py", "stopped")]
    shown = watch(tmp_path=tmp_path).stdout
    assert shown.startswith("Stopped"), shown
    assert "paceline server --database-url sqlite:///" in shown
