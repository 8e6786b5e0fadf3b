"""Runs a script of a framework as two gloo ranks with `PACELINE=1`, and reads their rings."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline_wire.ring import RingReader
from paceline_wire.spans import COMMUNICATION_OPS, Op, Span, unpack
from tests.forked_python import ForkedPython
from tests.ports import free_port

HERE = Path(__file__).parent
PYTHONS = (sys.executable, os.environ.get("PACELINE_FRAMEWORKS_PYTHON", ""))


class RecordedRank:
    """The spans and the last state of one rank."""

    def __init__(self, path: Path) -> None:
        reader = RingReader(path)
        self.view = reader.view()
        self.spans: list[Span] = list(unpack(reader.read()))
        self.metadata: dict[str, str] = {}
        for description in reader.new_descriptions():
            self.metadata |= description.metadata
        reader.close()

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps, in order."""
        return [span.step for span in self.spans if span.op == Op.STEP]

    def counts(self, op: Op) -> dict[int, int]:
        """Count the spans of an op by step."""
        numbers = self.steps
        return Counter(s.step for s in self.spans if s.op == op and s.step in numbers)

    def is_communicating(self) -> bool:
        """Return whether each step has communication."""
        found = {span.step for span in self.spans if span.op in COMMUNICATION_OPS}
        return found >= {*self.steps}


Run = Callable[..., list[RecordedRank]]


def python_with(framework: str) -> str:
    """Return an interpreter that can import the framework and Paceline; skip without one."""
    for python in filter(None, PYTHONS):
        check = f"import importlib.util as u; assert u.find_spec({framework!r})"
        if subprocess.run([python, "-c", check], capture_output=True).returncode == 0:
            return python
    pytest.skip(f"{framework} is not installed here (docs/integrations.md)")


def start_python(
    python: str, arguments: list[object], env: dict[str, str]
) -> ForkedPython | subprocess.Popen[str]:
    """Start a program with this interpreter; it is forked if this is the tests' own."""
    if python == sys.executable:
        return ForkedPython(arguments, env)
    pipe = subprocess.PIPE
    command = [python, *map(str, arguments)]
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture(scope="session")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where DeepSpeed builds its extension.

    A build that was interrupted leaves its lock, for which all later ones would wait.
    """
    return tmp_path_factory.mktemp("torch_extensions")


@pytest.fixture
def run_ranks(tmp_path: Path, extensions: Path) -> Run:
    """Run a script of this folder, which gets the output folder as its argument."""

    def run(script: str, framework: str, *, ranks: int = 2, **settings: str) -> list[RecordedRank]:
        python, port = python_with(framework), free_port()
        (rings := tmp_path / "rings").mkdir()
        (output := tmp_path / "output").mkdir()
        processes = []
        for rank in range(ranks):
            environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE")}
            environment |= {
                "PACELINE": "1",
                "PACELINE_RING_DIRECTORY": str(rings),
                "PACELINE_JOB": "job",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "NODE_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "PYTHONWARNINGS": "ignore",
                "TORCH_EXTENSIONS_DIR": str(extensions),
            }
            processes.append(start_python(python, [HERE / script, output], environment | settings))
        try:
            # DeepSpeed compiles an extension first, which takes minutes on a busy machine.
            outputs = ["".join(process.communicate(timeout=900)) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, printed in zip(processes, outputs, strict=True):
            assert process.returncode == 0, printed
            assert "paceline:" not in printed, printed
        return [RecordedRank(rings / f"job.g0.r{rank}.ring") for rank in range(ranks)]

    return run
