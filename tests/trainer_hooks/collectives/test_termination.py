"""An exception of C++ that nothing catches ends a rank with SIGABRT; the agent learns its text."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from paceline.collectives.build import find_library
from paceline_wire.ending import Ending, read_ending, write_ending
from tests import forked_python
from tests.ports import free_port

pytestmark = pytest.mark.usefixtures("library_of_process_groups")
START = """
import ctypes, os, torch, torch.distributed as dist, paceline
standard = ctypes.CDLL("libstdc++.so.6")
dist.init_process_group("gloo", rank=0, world_size=1)
paceline.init()
def throw(text):
    standard["_ZSt21__throw_runtime_errorPKc"](ctypes.c_char_p(text))
"""


def run(source: str, directory: Path) -> tuple[int, str]:
    """Run a rank. Return its exit status and what it wrote to stderr."""
    if find_library() is None:
        pytest.skip("no C++ compiler here")
    environment = {
        **os.environ,
        "PACELINE_RING_DIRECTORY": str(directory),
        "PACELINE_JOB": "local",
        "PACELINE_PURE_PYTHON": "",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    done = forked_python.run(["-c", START + source], environment)
    return done.returncode, done.stderr


def reported(directory: Path) -> Ending | None:
    (ring,) = directory.glob("*.ring")
    return read_ending(ring, os.getuid())


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            "throw(b'\"closed\"\\\\ by\\n peer \\xc3\\xa9')",
            "terminate called after throwing an instance of 'std::runtime_error'\n"
            '  what():  "closed"\\ by\n peer ??',
        ),
        ("standard._ZSt9terminatev()", "terminate called without an active exception"),
    ],
)
def test_the_exception_that_ends_a_rank_is_reported(tmp_path: Path, call: str, text: str) -> None:
    status, printed = run(call, tmp_path)
    assert status == -signal.SIGABRT
    assert "terminate called" in printed  # as without Paceline
    assert reported(tmp_path) == Ending(None, None, text)
    assert not list(tmp_path.glob("*.new"))


def test_threads_that_end_the_rank_together_leave_one_report(tmp_path: Path) -> None:
    together = """
import threading
barrier = threading.Barrier(8)
def end():
    barrier.wait()
    throw(b"together")
for thread in [threading.Thread(target=end) for _ in range(8)]:
    thread.start()
"""
    assert run(together, tmp_path)[0] == -signal.SIGABRT
    ending = reported(tmp_path)
    assert ending is not None
    assert ending.error.endswith("what():  together")


def test_an_error_that_was_reported_before_stays(tmp_path: Path) -> None:
    before = """
from pathlib import Path
from paceline.collectives.build import find_library
from paceline_wire.ending import Ending, write_ending
(ring,) = Path(os.environ["PACELINE_RING_DIRECTORY"]).glob("*.ring")
write_ending(ring, Ending(None, None, "first"))
throw(b"second")
"""
    assert run(before, tmp_path)[0] == -signal.SIGABRT
    assert reported(tmp_path) == Ending(None, None, "first")


def test_the_status_is_added_by_the_launcher(tmp_path: Path) -> None:
    run("throw(b'text')", tmp_path)
    (ring,) = tmp_path.glob("*.ring")
    write_ending(ring, Ending(None, int(signal.SIGABRT)))
    ending = read_ending(ring, os.getuid())
    assert ending is not None
    assert ending.signal == signal.SIGABRT
    assert ending.error.endswith("what():  text")


@pytest.mark.parametrize(
    "source",
    [
        "pid = os.fork()\nif pid == 0:\n    throw(b'of a worker')\nos.waitpid(pid, 0)",
        "paceline.finish()\nthrow(b'after the end of recording')",
    ],
)
def test_other_ends_are_not_reported(tmp_path: Path, source: str) -> None:
    run(source, tmp_path)
    assert reported(tmp_path) is None


def test_a_file_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    status, printed = run(
        "import shutil\nshutil.rmtree(os.environ['PACELINE_RING_DIRECTORY'])\nthrow(b'text')",
        tmp_path,
    )
    assert status == -signal.SIGABRT
    assert "text" in printed
