"""Whole processes: no agent, no torch, a full disk, a fork, a crash."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from paceline_wire.ending import Ending, fault_path, read_ending, read_fault
from paceline_wire.ring import RingReader
from paceline_wire.spans import Op, unpack
from tests import forked_python

RING = "local.g0.r0.ring"
LOOP = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
import paceline
paceline.init()
trained = 0
for batch in paceline.steps(range(3)):
    with paceline.section("work"), paceline.pipelining(paceline.Op.FORWARD, microbatch=0):
        trained += 1
    with paceline.optimizer(), paceline.checkpoint(), paceline.evaluate():
        paceline.report(loss=1.0)
    paceline.name_group(None, "world")
    assert paceline.pending() is None
    paceline.acknowledge(1, 1, 1)
print("trained", trained)
"""


def run(
    source: str, ring: Path | None, has_torch: bool = False, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run a script; with `has_torch`, in a process that has imported torch already."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    environment |= {"PACELINE_RING_DIRECTORY": str(ring or ""), "PACELINE_JOB": "local"}
    environment |= settings
    if has_torch:
        return forked_python.run(["-c", source], environment)
    return subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=150
    )


def test_without_an_agent_the_hooks_log_that_once_and_do_nothing(tmp_path: Path) -> None:
    finished = run(LOOP + "paceline.init()", None)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == [
        "INFO paceline is inert: no agent found on this node",
        "trained 3",
    ]


def test_the_hooks_neither_need_nor_load_torch(tmp_path: Path) -> None:
    blocked = "import sys; sys.modules['torch'] = None\n"
    finished = run(blocked + LOOP, tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "trained 3\n"
    loaded = run(LOOP + "print([m for m in sys.modules if m.startswith('torch')])", tmp_path)
    assert loaded.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("setting", "value", "complaint"),
    [
        ("PACELINE_RING_DIRECTORY", "/nonexistent/place", "No such file"),
        ("PACELINE_RING_CAPACITY", "1000", "power of two"),
        ("PACELINE_RING_CAPACITY", "many", "whole number"),
        ("RANK", "three", "RANK must be a whole number"),
    ],
)
def test_a_bad_setting_costs_a_warning_not_the_run(
    tmp_path: Path, setting: str, value: str, complaint: str
) -> None:
    finished = run(f"import os; os.environ[{setting!r}] = {value!r}\n" + LOOP, tmp_path)
    assert finished.returncode == 0, finished.stderr
    warning, trained = finished.stdout.splitlines()
    assert warning.startswith("WARNING paceline is off in this process: ")
    assert complaint in warning
    assert trained == "trained 3"


def test_a_full_tmpfs_costs_a_warning_not_the_run(tmp_path: Path) -> None:
    """The test uses a real tmpfs in its own mount namespace."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("no unshare here")
    inside = f'mount -t tmpfs -o size=256k none {tmp_path} && exec "$0" -c "$1"'
    command = [unshare, "--map-root-user", "--mount", "sh", "-c", inside]
    if subprocess.run([*command, "true", ""], capture_output=True).returncode:
        pytest.skip("this machine forbids mount namespaces")
    finished = subprocess.run(
        [*command, sys.executable, LOOP],
        env={**os.environ, "PACELINE_RING_DIRECTORY": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert finished.returncode == 0, finished.stderr
    assert "No space left" in finished.stdout
    assert finished.stdout.splitlines()[-1] == "trained 3"


def test_a_second_init_changes_nothing(tmp_path: Path) -> None:
    finished = run(LOOP.replace("trained = 0", "paceline.init(dp_rank=7); trained = 0"), tmp_path)
    assert "the first call stands" in finished.stdout
    assert RingReader(tmp_path / RING).identity.coordinates.dp_rank == 0


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("", "finished"),
        ("paceline.finish()", "finished"),
        ("raise SystemExit(3)", "finished"),
        ("raise SystemExit('config mismatch')", "failed"),
        ("import sys; sys.exit(3)", "failed"),
        ("import sys; sys.exit()", "finished"),
        ("import sys\nfor _ in paceline.steps([0]): sys.exit(3)", "failed"),
        ("exit(3)", "failed"),
        ("raise ValueError('diverged')", "failed"),
        ("import sys; print('a warning', file=sys.stderr)", "finished"),
        ("import os; os._exit(1)", "running"),
        ("import os\ntry: 1 / 0\nexcept ArithmeticError: os._exit(0)", "running"),
    ],
)
def test_the_page_shows_how_the_process_ended(tmp_path: Path, ending: str, status: str) -> None:
    run(LOOP + ending, tmp_path)
    assert RingReader(tmp_path / RING).view().status == status


STOPPED = """
import os, pathlib, paceline, paceline.awaited_restart
from paceline_wire.ring import ControlKind, RingReader
paceline.awaited_restart.sleep = print
paceline.init()
ring = RingReader(pathlib.Path(os.environ["PACELINE_RING_DIRECTORY"]) / "local.g0.r0.ring")
ring.command(7, getattr(ControlKind, "%s"), 3)
for step in paceline.steps(range(9)):
    if paceline.pending():
        paceline.acknowledge(7, paceline.AckStatus.DONE, 3)
        break
"""


@pytest.mark.parametrize(
    ("kind", "most_restarts", "code"),
    [("CHECKPOINT_AND_STOP", "3", 75), ("CHECKPOINT_AND_STOP", "0", 0), ("CHECKPOINT", "3", 0)],
)
def test_a_rank_that_stopped_for_its_restart_does_not_end_as_if_the_training_were_complete(
    tmp_path: Path, kind: str, most_restarts: str, code: int
) -> None:
    launcher = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": most_restarts}
    ended = run(STOPPED % kind, tmp_path, **launcher)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.split() == (["30.0"] if code else [])
    reader = RingReader(tmp_path / RING)
    assert reader.view().status == ("failed" if code else "finished")
    ending = read_ending(tmp_path / RING, os.getuid())
    assert ending == (Ending(75, None, "SystemExit: 75\n") if code else None)


@pytest.mark.parametrize("handler", ["print", "lambda *_: sys.exit(0)", "signal.SIG_IGN"])
def test_a_rank_that_waits_for_its_restart_ends_on_sigterm_whatever_the_script_does_on_it(
    tmp_path: Path, handler: str
) -> None:
    script = (
        f"{STOPPED % 'CHECKPOINT_AND_STOP'}\nimport signal, sys\n"
        f"signal.signal(signal.SIGTERM, {handler})\n"
        "def sleep(_):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('not ended')\n"
        "paceline.awaited_restart.sleep = sleep\n"
    )
    launcher = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "3"}
    ended = run(script, tmp_path, **launcher)
    assert (ended.returncode, ended.stdout) == (75, "")
    assert "Traceback" not in ended.stderr
    assert RingReader(tmp_path / RING).view().status == "failed"


def test_the_text_of_an_exit_is_reported_and_printed_as_without_paceline(tmp_path: Path) -> None:
    finished = run(LOOP + "raise SystemExit('config mismatch: vocab 50257 != 50304')", tmp_path)
    assert finished.returncode == 1
    assert finished.stderr.endswith("config mismatch: vocab 50257 != 50304\n")
    ending = read_ending(tmp_path / RING, os.getuid())
    assert ending == Ending(1, None, "SystemExit: config mismatch: vocab 50257 != 50304\n")


def test_the_error_is_reported_that_was_handled_when_the_script_exited(tmp_path: Path) -> None:
    handled = "import sys\ntry: raise OSError('disk gone')\nexcept OSError: sys.exit(4)"
    assert run(LOOP + handled, tmp_path).returncode == 4
    ending = read_ending(tmp_path / RING, os.getuid())
    assert ending is not None
    assert ending.exit_code == 4
    assert ending.error.rstrip().splitlines()[-1] == "OSError: disk gone"


@pytest.mark.parametrize("call", ["sys.exit(4)", "exit(4)"])
def test_the_place_of_an_exit_with_a_bare_number_is_reported(tmp_path: Path, call: str) -> None:
    handled = "import sys\ntry: raise OSError('disk gone')\nexcept OSError: pass\n"
    assert run(f"{LOOP}{handled}def end(): {call}\nend()", tmp_path).returncode == 4
    ending = read_ending(tmp_path / RING, os.getuid())
    assert ending is not None
    assert re.fullmatch(r"SystemExit: 4, raised in .+:\d+ end\n", ending.error)


def test_a_long_error_is_reported_with_its_first_and_its_last_line(tmp_path: Path) -> None:
    """`load_state_dict` lists all keys."""
    run(LOOP + "raise RuntimeError('Missing keys:\\n' + 'weight, ' * 2000 + '\\nlast')", tmp_path)
    ending = read_ending(tmp_path / RING, os.getuid())
    assert ending is not None
    *_, first, _keys, last = ending.error.splitlines()
    assert (first, last) == ("RuntimeError: Missing keys:", "last")


@pytest.mark.parametrize(("error", "is_reported"), [("KeyError", True), ("SystemExit", False)])
def test_an_error_that_ends_a_thread_that_trains_is_reported(
    tmp_path: Path, error: str, is_reported: bool
) -> None:
    """The process itself ends with 0, and other threads may end by errors of their own."""
    source = f"""
import threading
import paceline

def other() -> None:
    raise ValueError("of no rank")

def train() -> None:
    paceline.init()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    raise {error}("label 17")

thread = threading.Thread(target=train)
thread.start()
thread.join()
"""
    finished = run(source, tmp_path)
    assert finished.returncode == 0
    assert "of no rank" in finished.stderr  # as without the hooks
    assert ("label 17" in finished.stderr) == is_reported
    ending = read_ending(tmp_path / RING, os.getuid())
    assert (ending is not None) == is_reported
    if ending is not None:
        assert ending.error.startswith("Traceback")
        assert ending.error.endswith("KeyError: 'label 17'\n")


def test_the_first_error_of_a_group_is_reported(tmp_path: Path) -> None:
    inner = "ExceptionGroup('unhandled errors in a TaskGroup', [OSError('disk gone'), KeyError(3)])"
    assert run(LOOP + f"raise ExceptionGroup('several shards failed', [{inner}])", tmp_path).stderr
    ending = read_ending(tmp_path / RING, os.getuid())
    assert ending == Ending(1, None, "OSError: disk gone\n")


def test_an_exit_that_the_script_catches_to_train_on_is_no_end(tmp_path: Path) -> None:
    caught = "import sys\ntry: sys.exit(4)\nexcept SystemExit: pass\n"
    assert run(LOOP + caught + "list(paceline.steps([0]))", tmp_path).returncode == 0
    assert RingReader(tmp_path / RING).view().status == "finished"


def run_child(ending: str, method: str, directory: Path) -> None:
    """Run a rank that ends in this way as a child of multiprocessing."""
    (directory / "train.py").write_text(
        f"""
import os, paceline
def train():
    paceline.init()
    for _ in paceline.steps([0]):
        pass
    {ending}
"""
    )
    run(
        f"""
import multiprocessing, sys
sys.path.insert(0, {str(directory)!r})
import train
rank = multiprocessing.get_context({method!r}).Process(target=train.train)
rank.start()
rank.join()
""",
        directory,
    )


def test_an_exit_with_a_number_reports_the_error_that_was_handled(tmp_path: Path) -> None:
    """`torch.multiprocessing.spawn` ends a rank this way after an error."""
    handled = (
        "import sys\n    try: raise ValueError('diverged')\n    except ValueError: sys.exit(3)"
    )
    run_child(handled, "spawn", tmp_path)
    ending = read_ending(tmp_path / RING, os.getuid())
    assert ending is not None
    assert ending.exit_code == 3
    assert ending.error.rstrip().splitlines()[-1] == "ValueError: diverged"


@pytest.mark.parametrize(
    "ending",
    [
        "sys.excepthook = lambda *_: os._exit(7)\nraise ValueError('diverged')",
        "try: raise ValueError('diverged')\nexcept ValueError: os._exit(7)",
    ],
)
def test_an_error_is_reported_before_the_script_ends_the_process_at_once(
    tmp_path: Path, ending: str
) -> None:
    assert run(LOOP + "import os, sys\n" + ending, tmp_path).returncode == 7
    assert RingReader(tmp_path / RING).view().status == "failed"
    ended = read_ending(tmp_path / RING, os.getuid())
    assert ended is not None
    assert ended.error.endswith("ValueError: diverged\n")


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("pass", "finished"),
        ("raise SystemExit(0)", "finished"),
        ("raise SystemExit(1)", "failed"),
        ("raise ValueError('diverged')", "failed"),
        ("os._exit(1)", "running"),
    ],
)
def test_the_page_shows_how_a_child_of_multiprocessing_ended(
    tmp_path: Path, method: str, ending: str, status: str
) -> None:
    """torch.multiprocessing and notebooks start ranks this way."""
    run_child(ending, method, tmp_path)
    assert RingReader(tmp_path / RING).view().status == status


def test_an_earlier_error_in_an_interactive_shell_is_not_a_failure(tmp_path: Path) -> None:
    typed = "1 / 0\nimport paceline; paceline.init(); list(paceline.steps([0]))\n"
    finished = subprocess.run(
        [sys.executable, "-i"],
        env={**os.environ, "PACELINE_RING_DIRECTORY": str(tmp_path), "PACELINE_JOB": "local"},
        input=typed,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert "ZeroDivisionError" in finished.stderr
    assert RingReader(tmp_path / RING).view().status == "finished"


def test_after_sigkill_the_page_shows_what_the_rank_was_doing(tmp_path: Path) -> None:
    finished = run(
        """
import os, signal, paceline
paceline.init()
for batch in paceline.steps(range(10)):
    with paceline.pipelining(paceline.Op.FORWARD, microbatch=1):
        with paceline.section("attention"):
            if batch == 4:
                os.kill(os.getpid(), signal.SIGKILL)
""",
        tmp_path,
    )
    assert finished.returncode == -signal.SIGKILL
    reader = RingReader(tmp_path / RING)
    view = reader.view()
    assert (view.step, view.microbatch, view.status) == (4, 1, "running")
    assert [frame.op for frame in view.frames] == [Op.STEP, Op.FORWARD, 1024]
    complete = [span.step for span in unpack(reader.read()) if span.op == Op.STEP]
    assert complete == [0, 1, 2, 3]


PRCTL = """
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>
int prctl(int option, ...) {
    va_list arguments;
    va_start(arguments, option);
    FILE *log = fopen(LOG, "a");
    fprintf(log, "%#x %lu %d\\n", option, va_arg(arguments, unsigned long), getpid());
    fclose(log);
    va_end(arguments);
    return -1;  // as without Yama
}
"""


def test_the_agent_of_this_user_may_read_the_stacks_where_yama_forbids_it(tmp_path: Path) -> None:
    """The kernel may have no Yama, so that a library in place of libc's shows the calls."""
    (tmp_path / "prctl.c").write_text(PRCTL)
    library, log = tmp_path / "prctl.so", tmp_path / "log"
    build = ["gcc", "-shared", "-fPIC", f'-DLOG="{log}"', "-o", library, tmp_path / "prctl.c"]
    subprocess.run(build, check=True, timeout=60)
    rings = tmp_path / "rings"
    rings.mkdir()
    source = "import os, paceline\npaceline.init()\nif os.fork() == 0:\n    os._exit(0)\nos.wait()"
    assert run(source, rings, LD_PRELOAD=str(library)).returncode == 0
    assert not log.exists(), "no agent runs"
    with open(tmp_path / "agent.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run(source, rings, LD_PRELOAD=str(library)).returncode == 0
    calls = [line.split() for line in log.read_text().splitlines()]
    assert [call[:2] for call in calls] == [["0x59616d61", str(os.getpid())]] * 2
    assert calls[0][2] != calls[1][2], "the forked process, such as a loader worker, as well"


FAULTS = """
import faulthandler, os, signal, sys, paceline
def kernel(number):
    signal.raise_signal(number)
{before}
paceline.init()
{after}
for step in paceline.steps(range(10)):
    if step == 4:
        kernel({number})
"""


@pytest.mark.parametrize(
    "number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL]
)
def test_a_fatal_signal_leaves_the_python_line_and_ends_the_process_as_ever(
    tmp_path: Path, number: signal.Signals
) -> None:
    finished = run(FAULTS.format(before="", after="", number=number), tmp_path)
    assert finished.returncode == -number
    assert finished.stderr == ""
    fatal, _, *frames = read_fault(tmp_path / RING, os.getuid()).splitlines()
    assert fatal.startswith("Fatal Python error: ")
    assert frames[0] == '  File "<string>", line 4 in kernel'


@pytest.mark.parametrize(
    ("before", "after", "stream"),
    [
        ("faulthandler.enable(sys.stdout)", "", "stdout"),
        ("", "faulthandler.enable(sys.stdout)", "stdout"),
        ("", "faulthandler.disable()", None),
        ("signal.signal(signal.SIGSEGV, lambda *_: os._exit(7))", "", None),
    ],
)
def test_a_script_that_handles_fatal_signals_has_them_to_itself(
    tmp_path: Path, before: str, after: str, stream: str | None
) -> None:
    source = FAULTS.format(before=before, after=after, number=signal.SIGSEGV)
    finished = run(source, tmp_path)
    assert finished.returncode == (7 if "_exit" in before else -signal.SIGSEGV)
    assert read_fault(tmp_path / RING, os.getuid()) == ""
    assert stream is None or "line 4 in kernel" in getattr(finished, stream)


def test_a_fatal_signal_in_a_forked_child_is_not_the_ranks(tmp_path: Path) -> None:
    child = "child = os.fork()\nif child:\n    os.waitpid(child, 0)\n    os._exit(0)"
    finished = run(FAULTS.format(before="", after=child, number=signal.SIGSEGV), tmp_path)
    assert finished.returncode == 0
    assert fault_path(tmp_path / RING).read_text() == ""


def test_the_stacks_are_written_beside_the_ring_of_the_generation(tmp_path: Path) -> None:
    again = "paceline.finish()\nos.environ['PACELINE_GENERATION'] = '1'\npaceline.init()"
    run(FAULTS.format(before="", after=again, number=signal.SIGSEGV), tmp_path)
    assert read_fault(tmp_path / RING, os.getuid()) == ""
    assert "kernel" in read_fault(tmp_path / RING.replace("g0", "g1"), os.getuid())


def test_a_script_that_closes_all_descriptors_has_no_stacks_in_a_file_of_its_own(
    tmp_path: Path,
) -> None:
    """A new generation must not take the number of the descriptor, which is of another file."""
    own = tmp_path / "own"
    own.mkdir()
    others = f"files = [open(f'{own}/{{n}}', 'w') for n in range(32)]"
    again = "paceline.finish()\nos.environ['PACELINE_GENERATION'] = '1'\npaceline.init()"
    write = "for file in files: print('own', end='', file=file, flush=True)"
    after = f"os.closerange(3, 256)\n{others}\n{again}\n{write}"
    run(FAULTS.format(before="", after=after, number="'none'"), tmp_path)
    assert [path.read_text() for path in own.iterdir()] == ["own"] * 32


def test_a_forked_child_leaves_the_ring_alone(tmp_path: Path) -> None:
    finished = run(
        """
import os, sys, paceline
paceline.init()
kept = paceline.section("kept")
for batch in paceline.steps(range(2)):
    with paceline.section("around the fork"), paceline.pipelining(paceline.Op.FORWARD):
        child = os.fork()
        if child == 0:
            for _ in range(100):
                with kept, paceline.section("child"), paceline.optimizer():
                    paceline.report(loss=99.0)
                assert list(paceline.steps([1])) == [1]
            if batch:
                sys.exit(0)  # through every context manager and atexit
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
with kept:
    paceline.report(loss=1.0)
""",
        tmp_path,
    )
    assert finished.returncode == 0, finished.stderr
    reader = RingReader(tmp_path / RING)
    spans = list(unpack(reader.read()))
    assert [span.index for span in spans] == list(range(len(spans)))
    recorded = [span for span in spans if span.op != Op.GC]  # pauses, on a busy host
    assert len(recorded) == 1 + 2 * 4 + 1  # startup; wait, forward, section, step; the last section
    view = reader.view()
    assert (view.loss, view.status, view.frames) == (1.0, "finished", [])


@pytest.mark.parametrize("pure", ["", pytest.param("1", marks=pytest.mark.campaign)])
def test_a_forked_child_ends_none_of_the_parents_collectives(tmp_path: Path, pure: str) -> None:
    """The fake backend never completes a call by itself, and any process may call it."""
    finished = run(
        f"""
import os, torch, torch.distributed as dist, paceline
from paceline_wire.ring import RingReader
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
paceline.init()
work = dist.irecv(torch.ones(4), src=1)
child = os.fork()
if child == 0:
    dist.Work.wait(work)
    dist.all_reduce(torch.ones(4))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
view = RingReader({str(tmp_path / RING)!r}).view()
print(view.peers[0].recv_entered, view.peers[0].recv_left, view.groups)
dist.Work.wait(work)  # the fake has a wait of its own
view = RingReader({str(tmp_path / RING)!r}).view()
print(view.peers[0].recv_entered, view.peers[0].recv_left, view.groups)
dist.destroy_process_group()
""",
        tmp_path,
        has_torch=True,
        PACELINE_PURE_PYTHON=pure,
    )
    assert finished.stdout == "1 0 []\n1 1 []\n", finished.stderr


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_spawned_loader_worker_leaves_the_ring_alone(tmp_path: Path, method: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import multiprocessing, os, paceline
paceline.init()
if __name__ == "__main__":
    worker = multiprocessing.get_context({method!r}).Process(target=paceline.init)
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    for _ in paceline.steps(range(2)):
        pass
"""
    )
    again = f"import os, sys; os.execv(sys.executable, [sys.executable, {str(script)!r}])"
    finished = run(again, tmp_path)
    assert finished.returncode == 0, finished.stderr
    reader = RingReader(tmp_path / RING)
    assert [span.step for span in unpack(reader.read()) if span.op == Op.STEP] == [0, 1]


def test_a_run_that_replaces_a_dead_one_gets_the_ring(tmp_path: Path) -> None:
    """This holds even if an ancestor maps the old ring, like the agent."""
    run(LOOP + "import os; os._exit(1)", tmp_path)
    with closing(RingReader(tmp_path / RING)) as of_first:
        second = run(LOOP, tmp_path)
        assert second.stdout == "trained 3\n"
        with closing(RingReader(tmp_path / RING)) as of_second:
            assert of_second.identity.pid != of_first.identity.pid


def test_coordinates_come_from_the_environment_or_arguments(tmp_path: Path) -> None:
    environment = "import os; os.environ.update(RANK='5', WORLD_SIZE='8', PACELINE_JOB='a/b', "
    environment += "PACELINE_GENERATION='3', PACELINE_DP='2', PACELINE_PP='2', PACELINE_TP='2')\n"
    run(environment + LOOP, tmp_path)
    identity = RingReader(tmp_path / "a_b.g3.r5.ring").identity
    assert (identity.job, identity.generation, identity.rank) == ("a_b", 3, 5)
    assert identity.topology.coordinates(5) == identity.coordinates
    run(environment + LOOP.replace("init()", "init(dp_rank=0, pp_rank=1, tp_rank=0)"), tmp_path)
    identity = RingReader(tmp_path / "a_b.g3.r5.ring").identity
    assert identity.coordinates.pp_rank == 1
    assert identity.coordinates.tp_rank == 0


def test_torch_loaded_after_init_is_timed_too(tmp_path: Path) -> None:
    finished = run(
        """
import paceline
paceline.init()
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in paceline.steps([0]):
    dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
""",
        tmp_path,
    )
    assert finished.returncode == 0, finished.stderr
    assert Op.ALL_REDUCE in [span.op for span in unpack(RingReader(tmp_path / RING).read())]


@pytest.mark.parametrize("pure", ["", "1"], ids=["built", "pure"])
def test_a_loss_with_a_gradient_is_reported_without_a_warning(tmp_path: Path, pure: str) -> None:
    finished = run(
        f"""
import os
os.environ["PACELINE_PURE_PYTHON"] = {pure!r}
import torch, paceline
paceline.init()
loss = torch.ones(1, requires_grad=True).sum()
for _ in paceline.steps([0]):
    paceline.report(loss=loss, gradient_norm=loss * 2, evaluation_loss=loss * 3)
""",
        tmp_path,
        has_torch=True,
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    view = RingReader(tmp_path / RING).view()
    assert (view.loss, view.gradient_norm, view.evaluation_loss) == (1.0, 2.0, 3.0)


def test_the_compiler_sees_through_the_wrappers(tmp_path: Path) -> None:
    """`fullgraph` refuses any function it cannot trace."""
    finished = run(
        """
import torch, torch.distributed as dist, paceline
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
paceline.init()
frozen = torch.nn.BatchNorm1d(2)

@torch.compile(backend="eager", fullgraph=True)
def train(x):
    y = frozen.eval()(x.view(1, 2)).view(2) * 2
    frozen.train()
    dist.all_reduce(y)
    return y + 1

print(train(torch.ones(2)).round().tolist())
dist.destroy_process_group()
""",
        tmp_path,
        has_torch=True,
    )
    assert finished.stdout == "[3.0, 3.0]\n", finished.stderr


def test_no_function_of_paceline_is_compiled_inside_a_compiled_step(tmp_path: Path) -> None:
    finished = run(
        """
import torch, paceline
from paceline.recognition import Recognition
paceline.init()
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter])

@torch.compile(backend="eager")
def train():
    parameter.sum().backward()
    optimizer.step()

for _ in range(3):
    train()
cached = torch._dynamo.eval_frame._debug_get_cache_entry_list
print([name for name, each in vars(Recognition).items() if getattr(each, "__code__", None)
       and cached(each.__code__)], round(parameter.item(), 3))
""",
        tmp_path,
        has_torch=True,
    )
    assert finished.stdout == "[] 0.994\n", finished.stderr


@pytest.mark.parametrize("has_agent", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_the_compiler_leaves_sections_out(tmp_path: Path, has_agent: bool) -> None:
    finished = run(
        """
import torch, paceline
paceline.init()

@torch.compile(backend="eager", fullgraph=True)
def train(x):
    with paceline.section("first"), paceline.optimizer(), paceline.evaluate():
        y = x * 2
    with paceline.pipelining(paceline.Op.FORWARD, microbatch=1), paceline.checkpoint():
        return y + 1

with paceline.section("around"):
    print(train(torch.ones(2)).tolist())
""",
        tmp_path if has_agent else None,
        has_torch=True,
    )
    assert finished.stdout == "[3.0, 3.0]\n", finished.stderr
    if has_agent:
        ops = [span.op for span in unpack(RingReader(tmp_path / RING).read())]
        assert [op for op in ops if op != Op.GC] == [1024]


def test_communication_works_and_is_not_recorded_after_finish(tmp_path: Path) -> None:
    finished = run(
        """
import torch, torch.distributed as dist, paceline
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
paceline.init()
paceline.finish()
dist.all_reduce(torch.ones(1))
assert dist.all_reduce(torch.ones(1), async_op=True).wait()
dist.destroy_process_group()  # without it, gloo sometimes aborts at exit, also without Paceline
""",
        tmp_path,
        has_torch=True,
    )
    assert finished.returncode == 0, finished.stderr


ENDS_WHILE_A_THREAD_WAITS = """
import os, sys, threading, time
import torch
import torch.distributed as dist
import paceline
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
paceline.init()
dist.all_reduce(torch.zeros(1))
read, write = os.pipe()

def release() -> None:
    os.read(read, 1)
    os.write(1, b"released")  # needs the GIL after the read, as the destructor of a tensor does

threading.Thread(target=release, daemon=True).start()
time.sleep(0.1)
sys.setswitchinterval(1000.0)
os.write(write, b"x")
"""


def test_a_thread_that_waits_for_the_interpreter_at_the_end_still_gets_it(tmp_path: Path) -> None:
    """Else a thread of gloo that releases the tensors of the last collective aborts the process."""
    for attempt in range(4):
        (ring := tmp_path / str(attempt)).mkdir()
        finished = run(ENDS_WHILE_A_THREAD_WAITS, ring, has_torch=True)
        assert (finished.returncode, finished.stdout) == (0, "released"), finished.stderr
