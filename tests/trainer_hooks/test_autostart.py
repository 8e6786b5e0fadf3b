"""`PACELINE=1`: a training that nobody changed is recorded, and nothing else that imports torch."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import paceline_autostart
from paceline_wire.ending import read_ending
from paceline_wire.ring import RingReader
from paceline_wire.spans import Op, unpack
from tests import forked_python
from tests.ports import free_port

# Two ranks of a training that does not know of Paceline, with all kinds of helper processes.
TRAINING = """
import os, sys, time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(8, 4))
    for (batch,) in DataLoader(data, 4, num_workers=1, multiprocessing_context=METHOD):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    dist.destroy_process_group()

METHOD = sys.argv[1]
if __name__ == "__main__":
    main()
"""
CREATE = """
import os, torch
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter])
"""
STEPS = """
for _ in range(2):
    parameter.sum().backward()
    optimizer.step()
"""
SINGLE = CREATE + 'assert "paceline" not in __import__("sys").modules' + STEPS


def environment(ring: Path | None, **settings: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE")}
    own = {"PACELINE": "1", "PACELINE_RING_DIRECTORY": str(ring or "")}
    return inherited | own | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | settings


def run(*command: str, ring: Path | None, **settings: str) -> subprocess.CompletedProcess[str]:
    variables = environment(ring, **settings)
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=150)


def python(source: str, ring: Path | None, **settings: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-c", source, ring=ring, **{"PACELINE_JOB": "job"} | settings)


def forked(source: str, ring: Path | None, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a script right after the end of its `import torch`, for what does not depend on that."""
    variables = environment(ring, **{"PACELINE_JOB": "job"} | settings)
    return forked_python.run(["-c", source], variables)


def rings(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.ring"))


def operations(path: Path) -> list[int]:
    return [span.op for span in unpack(RingReader(path).read())]


def test_torch_finds_the_entry_point() -> None:
    (found,) = (entry for entry in entry_points(group="torch.backends") if entry.name == "paceline")
    assert found.load() is paceline_autostart.load


@pytest.mark.parametrize(
    "method", ["spawn", pytest.param("forkserver", marks=pytest.mark.campaign)]
)
def test_torchrun_records_its_ranks_and_no_other_process(tmp_path: Path, method: str) -> None:
    """Not the launcher, nor data loader workers; and nothing is printed."""
    script, ring = tmp_path / "train.py", tmp_path / "rings"
    script.write_text(TRAINING)
    ring.mkdir()
    finished = run(
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
        *(f"--master-port={free_port()}", str(script), method),
        ring=ring,
    )
    assert finished.returncode == 0, finished.stderr
    assert "paceline" not in finished.stderr
    names = rings(ring)
    assert [name.rpartition(".g0.")[2] for name in names] == ["r0.ring", "r1.ring"]
    for name in names:
        assert RingReader(ring / name).identity.metadata["script"] == "train.py"
        assert operations(ring / name).count(Op.ALL_REDUCE) >= 2, "the reducer's"


@pytest.mark.parametrize(
    "start",
    ["'env://'", pytest.param("'tcp://127.0.0.1:%s' % port", marks=pytest.mark.campaign)],
)
def test_spawned_ranks_without_variables_are_recorded(tmp_path: Path, start: str) -> None:
    script, ring, port = tmp_path / "train.py", tmp_path / "rings", free_port()
    ring.mkdir()
    script.write_text(
        f"""
import os, torch, torch.distributed as dist
port = "{port}"
def train(rank):
    if {start} == "env://":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", init_method={start}, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    dist.destroy_process_group()
if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
"""
    )
    finished = run(sys.executable, str(script), ring=ring)
    assert (finished.returncode, finished.stderr) == (0, "")
    host = os.uname().nodename.partition(".")[0][:40]
    assert rings(ring) == [f"{host}-{port}.g0.r{rank}.ring" for rank in range(2)]
    assert RingReader(ring / rings(ring)[1]).view().status == "finished"


@pytest.mark.parametrize(
    ("interrupt", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGINT)", "KeyboardInterrupt"),
        ("os.kill(os.getppid(), signal.SIGKILL)", "the process that spawned this rank has ended"),
    ],
    ids=["ctrl-c", "parent killed"],
)
def test_a_spawned_rank_that_is_interrupted_has_not_finished(
    tmp_path: Path, interrupt: str, text: str
) -> None:
    """Torch has it exit with 0."""
    script, ring = tmp_path / "train.py", tmp_path / "rings"
    ring.mkdir()
    script.write_text(
        f"""
import os, signal, time, torch
def train(rank):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    parameter.sum().backward()
    optimizer.step()
    {interrupt}
    time.sleep(100)
if __name__ == "__main__":
    torch.multiprocessing.spawn(train)
"""
    )
    run(sys.executable, str(script), ring=ring, PACELINE_JOB="job")
    assert RingReader(ring / "job.g0.r0.ring").view().status == "failed"
    ending = read_ending(ring / "job.g0.r0.ring", os.getuid())
    assert ending is not None
    assert text in ending.error


def test_a_process_without_a_process_group_is_recorded_from_its_first_optimizer_step(
    tmp_path: Path,
) -> None:
    """A child forked afterwards, such as a loader worker, leaves the ring alone."""
    ending = """
child = os.fork()
if child == 0:
    optimizer.step()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    finished = python(SINGLE + ending, tmp_path)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert rings(tmp_path) == ["job.g0.r0.ring"]
    reader = RingReader(tmp_path / "job.g0.r0.ring")
    assert (reader.identity.world_size, reader.view().status) == (1, "finished")


@pytest.mark.parametrize(("passes", "is_recorded"), [(63, False), (80, True)])
def test_a_training_without_an_optimizer_of_torch_is_recorded_after_some_passes(
    tmp_path: Path, passes: int, is_recorded: bool
) -> None:
    updates = f"""
for _ in range({passes}):
    parameter.sum().backward()
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad
        parameter.grad = None
"""
    finished = python(CREATE + updates, tmp_path)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert rings(tmp_path) == ["job.g0.r0.ring"] * is_recorded
    if is_recorded:
        spans = unpack(RingReader(tmp_path / "job.g0.r0.ring").read())
        assert [span.step for span in spans if span.op == Op.STEP] == list(range(passes - 64))


@pytest.mark.parametrize("value", ["", "1"])
def test_a_script_may_import_torch_after_init(tmp_path: Path, value: str) -> None:
    begun = "import paceline\npaceline.init()\n"
    finished = python(begun + CREATE + STEPS, tmp_path, PACELINE=value)
    assert (finished.returncode, finished.stderr) == (0, "")
    [ring] = rings(tmp_path)
    found = {span.op for span in unpack(RingReader(tmp_path / ring).read())}
    assert {Op.STEP, Op.BACKWARD, Op.OPTIMIZER} <= found


def test_the_thread_that_trains_is_reported(tmp_path: Path) -> None:
    """Also if the main thread has created the process group, with which the recording begins."""
    source = """
import threading
import torch.distributed as dist
from paceline_wire.ring import RingReader
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{PORT}", rank=0, world_size=1)
native_ids = [threading.get_native_id()]

def show():
    with_ring = RingReader(RING)
    print(native_ids.index(with_ring.identity.native_thread_id))

def train():
    native_ids.append(threading.get_native_id())
    for _ in range(2):
        parameter.sum().backward()
        optimizer.step()
    show()

show()
thread = threading.Thread(target=train)
thread.start()
thread.join()
dist.destroy_process_group()
"""
    values = f"PORT, RING = {free_port()}, {str(tmp_path / 'job.g0.r0.ring')!r}\n"
    finished = forked(values + CREATE + source, tmp_path, RANK="0", WORLD_SIZE="1")
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "0\n1\n", "")


def test_an_optimizer_step_of_a_backward_pass_shows_no_other_thread_that_trains(
    tmp_path: Path,
) -> None:
    """On a GPU a thread of torch makes it, while the main one waits."""
    source = """
import threading
import torch.distributed as dist
from paceline_wire.ring import RingReader
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{PORT}", rank=0, world_size=1)
parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
thread = threading.Thread(target=lambda: parameter.sum().backward())
thread.start()
thread.join()
print(RingReader(RING).identity.native_thread_id == threading.get_native_id())
dist.destroy_process_group()
"""
    values = f"PORT, RING = {free_port()}, {str(tmp_path / 'job.g0.r0.ring')!r}\n"
    finished = forked(values + CREATE + source, tmp_path, RANK="0", WORLD_SIZE="1")
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "True\n", "")


def test_functions_that_are_replaced_can_be_pickled(tmp_path: Path) -> None:
    """A script may have another process save its checkpoints."""
    ending = """
import pickle
import torch.distributed.checkpoint as dcp
optimizer.step()
for function in (torch.save, torch.serialization.save, dcp.save, dcp.async_save, os._exit):
    assert hasattr(function, "__wrapped__"), function
    assert pickle.loads(pickle.dumps(function)) is function
"""
    finished = python(SINGLE + ending, tmp_path, TORCHELASTIC_RUN_ID="run")
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.parametrize(
    ("value", "autoload"),
    [
        ("", "1"),
        ("1", "0"),
        ("maybe", "1"),
        pytest.param("0", "1", marks=pytest.mark.campaign),
        pytest.param("Off", "1", marks=pytest.mark.campaign),
    ],
)
def test_nothing_is_started_unless_the_variable_asks(
    tmp_path: Path, value: str, autoload: str
) -> None:
    run_script = python if autoload == "0" else forked  # torch reads it when it is imported
    finished = run_script(
        SINGLE + "import sys; assert 'paceline' not in sys.modules",
        tmp_path,
        PACELINE=value,
        TORCH_DEVICE_BACKEND_AUTOLOAD=autoload,
    )
    assert finished.returncode == 0, finished.stderr
    assert rings(tmp_path) == []
    if value == "maybe":
        assert "PACELINE must be 1 or 0, got 'maybe'" in finished.stderr
    else:
        assert finished.stderr == ""


def test_without_an_agent_that_is_logged_once_and_nothing_else(tmp_path: Path) -> None:
    logging = "import logging; logging.basicConfig(level=20, format='%(levelname)s %(message)s')\n"
    finished = forked(logging + CREATE + STEPS, None)
    assert finished.returncode == 0
    assert finished.stderr == "INFO paceline is inert: no agent found on this node\n"


@pytest.mark.parametrize("fault", ["import", "start"])
def test_an_error_of_paceline_neither_fails_the_import_of_torch_nor_the_training(
    tmp_path: Path, fault: str
) -> None:
    if fault == "import":
        (tmp_path / "paceline.py").write_text("raise OSError('unreadable')")
        finished = python(SINGLE, tmp_path / "none", PYTHONPATH=str(tmp_path))
    else:
        finished = forked(CREATE + STEPS, tmp_path / "none")
    assert finished.returncode == 0, finished.stderr
    assert len(finished.stderr.splitlines()) == 1
    assert fault != "import" or "unreadable" in finished.stderr


DISTRIBUTED = """
import logging, sys, torch, torch.distributed as dist
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize("imports", ["before", "after"])
def test_the_scripts_own_init_is_merged_without_a_warning(tmp_path: Path, imports: str) -> None:
    own = """
import paceline
mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
paceline.init(mesh=mesh, metadata={"model": "7b"})
paceline.init()
for _ in paceline.steps(range(2)):
    dist.all_reduce(torch.ones(1))
del mesh  # keeps gloo's threads alive, which abort now and then when the interpreter ends
dist.destroy_process_group()
"""
    if imports == "before":
        finished = python("import paceline\n" + DISTRIBUTED + own, tmp_path)
    else:
        finished = forked(DISTRIBUTED + own, tmp_path)
    assert finished.returncode == 0
    assert finished.stderr == "paceline.init() was called again; the first call stands\n"
    reader = RingReader(tmp_path / "job.g0.r0.ring")
    assert reader.identity.metadata["model"] == "7b"
    assert operations(tmp_path / "job.g0.r0.ring").count(Op.STEP) == 2


def test_a_plain_init_of_the_script_changes_nothing(tmp_path: Path) -> None:
    finished = forked(
        DISTRIBUTED + "import paceline; paceline.init(); dist.destroy_process_group()", tmp_path
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    assert Op.ALL_REDUCE in operations(tmp_path / "job.g0.r0.ring"), "from before the call"


def test_a_second_process_group_is_recorded_too(tmp_path: Path) -> None:
    again = """
dist.destroy_process_group()
from torch.distributed import init_process_group
init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""
    finished = forked(DISTRIBUTED + again, tmp_path)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert operations(tmp_path / "job.g0.r0.ring").count(Op.ALL_REDUCE) == 2


# A rendezvous that shows what the agent sees while this rank waits in it for the others.
RENDEZVOUS = """
import os, torch, torch.distributed as dist
from pathlib import Path
from paceline_wire.ring import RingReader, RingError, reserve
from torch.distributed.rendezvous import register_rendezvous_handler

def show():
    try:
        reader = RingReader(Path(os.environ["PACELINE_RING_DIRECTORY"], "job.g0.r0.ring"))
        return reader.view().status, reader.identity.started_ns, reader.identity.is_reserved
    except RingError:
        return None

def meet(url, timeout, **options):
    print(show()[0] if show() else "no ring")
    if "fail" in url:
        raise OSError("store down")
    yield dist.HashStore(), 0, SIZE

register_rendezvous_handler("show", meet)
SIZE = 1
"""
PLACE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
JOIN = "dist.init_process_group('gloo', init_method='show://', world_size=SIZE, rank=0)\n"


@pytest.mark.parametrize("imports", ["", "import paceline\n"])
def test_a_rank_shows_that_it_waits_in_init_process_group(tmp_path: Path, imports: str) -> None:
    done = forked(RENDEZVOUS + imports + JOIN + "print(show()[0])", tmp_path, **PLACE)
    assert (done.stdout, done.stderr) == ("joining\nstarting\n", "")


def test_an_error_of_init_process_group_is_raised_unchanged(tmp_path: Path) -> None:
    call = """
try:
    dist.init_process_group("gloo", init_method="show://fail", world_size=1, rank=0)
except OSError as error:
    print(error.args, show()[0])
"""
    done = forked(RENDEZVOUS + call, tmp_path, **PLACE)
    assert (done.stdout, done.stderr) == ("joining\n('store down',) starting\n", "")


def test_a_group_of_other_ranks_than_the_launchers_is_recorded_once_it_exists(
    tmp_path: Path,
) -> None:
    place = PLACE | {"WORLD_SIZE": "4"}
    done = forked(RENDEZVOUS + JOIN + "print(show()[0])", tmp_path, **place)
    assert (done.stdout, done.stderr) == ("no ring\nstarting\n", "")


def test_a_rank_continues_the_run_of_its_reserved_ring(tmp_path: Path) -> None:
    """A stale ring of an earlier process with the same pid is no part of it."""
    begin = """
from msgspec.structs import replace
from paceline.environment import identify, read_rank_environment
rank = read_rank_environment()
now = identify(rank, rank.topology, rank.topology.coordinates(0), {})
reserve(rank.ring_path, replace(now, is_reserved=True, started_ns=now.started_ns - AGE_NS))
before = show()
"""
    check = "after = show()\nprint(before[1] == after[1], before[2], after[2])"
    for age_ns, output in (("1", "True True False"), ("now.started_ns // 2", "False True False")):
        source = RENDEZVOUS + begin.replace("AGE_NS", age_ns) + JOIN + check
        done = forked(source, tmp_path, **PLACE)
        assert (done.stdout, done.stderr) == (f"joining\n{output}\n", "")
        (tmp_path / "job.g0.r0.ring").unlink()


def test_compiled_code_is_compiled_as_before(tmp_path: Path) -> None:
    """The start of the hooks adds no graph break to those that torch's optimizer has itself."""
    finished = forked(
        """
import torch
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter])
@torch.compile(backend="eager")
def train():
    optimizer.step()
for _ in range(2):
    parameter.sum().backward()
    train()
print(torch._dynamo.utils.counters)
""",
        tmp_path,
    )
    assert finished.returncode == 0, finished.stderr
    assert "graph_break" in finished.stdout
    assert "getpid" not in finished.stdout
    assert "paceline" not in finished.stdout
