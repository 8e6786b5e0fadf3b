"""The commands of the README are run unchanged, on one machine in place of the cluster."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.test_documented_commands import ROOT, documented
from tests.ports import free_port

DATA = ROOT / "tests" / "server"
TRAINER = "import time\nfor step in range(20):\n    time.sleep(0.1)\n"
# Values for the placeholders of the README; a job of 64 ranks becomes one of two.
WORDS = {
    "trace.parquet": str(DATA / "whatif/data/trace-ST.parquet"),
    "meta.yaml": str(DATA / "whatif/data/meta-ST.yaml"),
    "DIR": "dumps",
    "python": sys.executable,
    "torchrun": str(Path(sys.executable).with_name("torchrun")),
}
SIZES = {"--dp": "2", "--pp": "1", "--tp": "1", "--nproc-per-node": "1"}
RUNS_ON = ("server", "agent")  # commands that run until they are stopped
# Reasons for which a command may fail here.
REFUSED = {
    "actions approve ACTION": "no action",
    "jobs restart JOB": "no job",
    "preflight --nodes": "node-1",
}


def commands() -> list[list[str]]:
    """Return the complete commands of the README's shell blocks, in order."""
    found = [words for where, words in documented("paceline") if where.startswith("README.md")]
    return [words for words in found if words and words not in (["run"], ["login"])]


class Machine:
    """A directory with the files that the commands name, and the processes that keep running."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "train.py").write_text(TRAINER)
        with tarfile.open(DATA / "flight_recorder/data/lock_gil_1st.tar.gz") as dumps:
            dumps.extractall(directory / "dumps", filter="data")
        self.port = str(free_port())
        self._make_certificate()
        self.environment = {
            **os.environ,
            "PACELINE_SERVER_PORT": self.port,
            "PACELINE_SERVER": f"https://localhost:{self.port}",
            "PACELINE_TLS_CA": "CERT.pem",
            "PACELINE_AGENT_TLS_CA": str(directory / "CERT.pem"),
            "PACELINE_AGENT_NODE_DIRECTORY": str(directory / "node"),
            "PACELINE_AGENT_SLOTS": "2",
            "PACELINE_AGENT_RUN_AS": "root" if os.geteuid() == 0 else "",
            "PACELINE_AGENT_METRICS_PORT": "0",
        }
        self.running: list[subprocess.Popen[bytes]] = []

    def _make_certificate(self) -> None:
        subprocess.run(
            shlex.split(
                "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
                " -keyout KEY.pem -out CERT.pem -days 2 -subj /CN=localhost"
                " -addext subjectAltName=DNS:localhost"
            ),
            cwd=self.directory,
            check=True,
            capture_output=True,
        )

    def words(self, given: list[str]) -> list[str]:
        here = f"localhost:{self.port}"
        words = [WORDS.get(word, word.replace("HOST:8470", here)) for word in given]
        for option, size in SIZES.items():
            if option in words:
                words[words.index(option) + 1] = size
        return words

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "paceline_cli", *words],
            cwd=self.directory,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=150,
        )

    def start(self, *words: str) -> None:
        with (self.directory / f"{words[0]}.log").open("wb") as log:
            command = [sys.executable, "-m", "paceline_cli", *words]
            process = subprocess.Popen(
                command, cwd=self.directory, env=self.environment, stdout=log, stderr=log
            )
        self.running.append(process)

    def wait_until(self, *words: str, shows: str) -> None:
        deadline = time.monotonic() + 60
        while (shown := self.run(*words)).returncode or shows not in shown.stdout:
            logs = [path.read_text() for path in self.directory.glob("*.log")]
            assert time.monotonic() < deadline, (shown, logs)
            time.sleep(0.3)

    def stop(self) -> None:
        for process in reversed(self.running):
            process.terminate()
            process.wait(60)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    found = Machine(tmp_path)
    yield found
    found.stop()


@pytest.mark.timeout(300)
def test_every_command_of_the_readme_does_what_it_says(machine: Machine) -> None:
    assert len(commands()) >= 11
    for scope in ("agent", "operator"):
        created = machine.run("server", "token", "create", "--name", scope, "--scope", scope)
        assert created.returncode == 0, created.stderr
        name = "PACELINE_AGENT_TOKEN" if scope == "agent" else "PACELINE_TOKEN"
        machine.environment[name] = created.stdout.strip()
    for given in commands():
        words = machine.words(given)
        if words[0] in RUNS_ON and not {"--check", "--once", "token"} & {*words}:
            machine.start(*words)
            machine.wait_until("nodes", shows=socket.gethostname() if words[0] == "agent" else "")
            continue
        node = {"PACELINE_AGENT_NODE_DIRECTORY": str(machine.directory / "watch")}
        done = machine.run(*words, **(node if words[0] == "watch" else {}))
        shown = done.stdout + done.stderr
        assert "Traceback" not in shown, shown
        line = " ".join(given)
        reason = next((why for key, why in REFUSED.items() if line.startswith(key)), None)
        if reason is not None:
            assert reason in shown.lower(), shown
        else:
            assert done.returncode == 0, (given, shown)
