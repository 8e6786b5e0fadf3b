"""A ring directory per test, and the two-rank run that several tests read."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import paceline
from paceline.collectives.build import BuildError, build, find_library
from paceline.recorder import Recorder
from paceline_wire.ring import RingReader
from paceline_wire.spans import Span, unpack
from tests import forked_python
from tests.forked_python import ForkedPython
from tests.one_rank import recorder
from tests.ports import free_port

HERE = Path(__file__).parent


@pytest.fixture
def ring_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set the environment like an agent; finish the hooks after the test."""
    monkeypatch.setenv("PACELINE_RING_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("PACELINE_JOB", "local")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PACELINE_GENERATION"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    paceline.finish()


@pytest.fixture
def reader(ring_directory: Path) -> Iterator[RingReader]:
    """Start the hooks and open the agent's end of their ring."""
    gc.collect()  # a training continues the steps of an optimizer that an earlier test has loaded
    paceline.init()
    reader = RingReader(ring_directory / "local.g0.r0.ring")
    yield reader
    reader.close()


Script = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Run Python source in its own process, with a ring directory by default."""

    def run(source: str, ring: Path | None = tmp_path) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
        environment |= {"PACELINE_RING_DIRECTORY": str(ring or ""), "PACELINE_JOB": "local"}
        return forked_python.run(["-c", source], environment)

    return run


@contextlib.contextmanager
def rings_of_two_ranks(script: str, directory: Path, pure: str = "") -> Iterator[list[RingReader]]:
    """Run a script of this folder as two gloo ranks; yield their rings."""
    port = free_port()
    processes = [
        ForkedPython(
            [HERE / script],
            {
                **os.environ,
                "PACELINE_RING_DIRECTORY": str(directory),
                "PACELINE_JOB": "local",
                "PACELINE_PURE_PYTHON": pure,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    readers = [RingReader(directory / f"local.g0.r{rank}.ring") for rank in range(2)]
    yield readers
    for reader in readers:
        reader.close()


@pytest.fixture(scope="session")
def library_of_process_groups() -> None:
    """Build the library that records process groups, like `make`, if there is a compiler."""
    with contextlib.suppress(BuildError):
        if find_library() is None:
            build()


@pytest.fixture(scope="session", params=["", "1"], ids=["built", "pure"])
def two_ranks(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    library_of_process_groups: None,
) -> Iterator[list[RingReader]]:
    """The rings of `two_ranks.py`, with each implementation of the writer."""
    directory = tmp_path_factory.mktemp("rings")
    with rings_of_two_ranks("two_ranks.py", directory, request.param) as readers:
        yield readers


@pytest.fixture(scope="session", params=["", "1"], ids=["built", "pure"])
def foreign_spans(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    library_of_process_groups: None,
) -> list[list[Span]]:
    """Spans of the two ranks of `foreign_ranks.py`, with each implementation."""
    directory = tmp_path_factory.mktemp("rings")
    with rings_of_two_ranks("foreign_ranks.py", directory, request.param) as readers:
        return [list(unpack(reader.read())) for reader in readers]


@pytest.fixture(scope="session")
def two_rank_spans(two_ranks: list[RingReader]) -> list[list[Span]]:
    return [list(unpack(reader.read())) for reader in two_ranks]


@pytest.fixture
def small(ring_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RingReader]:
    """A ring of 64 records."""
    monkeypatch.setenv("PACELINE_RING_CAPACITY", "64")
    paceline.init()
    reader = RingReader(ring_directory / "local.g0.r0.ring")
    yield reader
    reader.close()


@pytest.fixture
def ring(tmp_path: Path) -> Recorder:
    """A recorder without the process-wide hooks."""
    return recorder(tmp_path / "one.ring")


def run_scenarios(script: str, directory: Path, *names: str) -> str:
    """Run each scenario of a script of this folder with its ring in `directory`.

    With `names` only these, of a script that takes them. Returns what it printed.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    finished = forked_python.run(
        ["-W", "error", HERE / script, directory, *names],
        {**environment, "PACELINE_RING_DIRECTORY": str(directory)},
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout
