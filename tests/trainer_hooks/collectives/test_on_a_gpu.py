"""Calls on a GPU, recorded by the C++ library with CUDA events; the device is `fake_cuda.cpp`.

`tests/gpu` has a real one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.collectives.build import find_library
from paceline_wire.ring import RingReader
from paceline_wire.spans import Flag, Op, Span, unpack

SOURCE = Path(__file__).parent / "fixtures" / "fake_cuda.cpp"
TRANSFER_NS = 5_000_000
PRELUDE = """
import types
import torch, torch.distributed as dist
torch.ops.load_library({library!r})
from torch.testing._internal.distributed.fake_pg import FakeStore
import paceline
from paceline import hooks
cuda = torch.ops.fake_cuda
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
cuda.use(dist.group.WORLD.boxed())
paceline.init()
groups = hooks._session.process_groups
assert type(groups).__name__ == "NativeRecorder", type(groups)
event = types.SimpleNamespace(cuda_event=cuda.anchor(), device=torch.device("cuda", 0))
tensor = cuda.tensor(1000)
steps = iter(paceline.steps(range(100)))

def boundary(device_catches_up=True):
    if device_catches_up:
        cuda.catch_up()
    groups.set_anchor(event, 1_000_000_000)
    next(steps)

boundary()
"""
BATCH = """
group = dist.group.WORLD
group._start_coalescing(torch.device("cuda", 0))
group.send([tensor], 1, 0)
group.recv([tensor], 1, 0)
work = group._end_coalescing(torch.device("cuda", 0))
"""
END = """
boundary()
boundary()
paceline.finish()
"""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")


@pytest.fixture(scope="module")
def library(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    library_of_process_groups: None,
) -> Path:
    """The fake device, built once for each version of it and of torch."""
    if find_library() is None:
        pytest.skip("the library of process groups was not built")
    name = f"{torch.__version__}.{hashlib.sha256(SOURCE.read_bytes()).hexdigest()}.so"
    cached: Path = request.config.cache.mkdir("fake_cuda") / name
    if cached.exists():
        return cached
    built = tmp_path_factory.mktemp("fake") / "fake_cuda.so"
    torch_directory = Path(torch.__file__).parent
    include = torch_directory / "include"
    command = [
        *("g++", "-std=c++20", "-O0", "-fPIC", "-shared", "-w", str(SOURCE), "-DUSE_DISTRIBUTED"),
        *(f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"),
        *(f"-L{torch_directory / 'lib'}", "-lc10", "-ltorch_cpu", "-o", str(built)),
    ]
    subprocess.run(command, check=True, timeout=170)
    partial = cached.with_suffix(f".{os.getpid()}")
    shutil.copy(built, partial)
    return partial.replace(cached)


Run = Callable[[str], list[Span]]
Script = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(library: Path, script: Script, tmp_path: Path) -> Run:
    def spans(body: str) -> list[Span]:
        finished = script(PRELUDE.format(library=str(library)) + body + END)
        assert finished.returncode == 0, finished.stderr
        found = unpack(RingReader(tmp_path / "local.g0.r0.ring").read())
        return [span for span in found if span.op in (Op.ALL_REDUCE, Op.SEND, Op.RECV)]

    return spans


def test_a_blocking_call_lasts_as_long_as_on_the_device(run: Run) -> None:
    (span,) = run("cuda.kernel(20.0); dist.all_reduce(tensor)")
    assert (span.flags, span.bytes) == (Flag.DEVICE, 4000)
    assert span.duration_ns == TRANSFER_NS
    assert span.start_ns == 1_000_000_000 + 20_000_000


def test_an_asynchronous_call_and_its_wait(run: Run) -> None:
    call, wait = run("""
work = dist.all_reduce(tensor, async_op=True)
cuda.kernel(3.0)
work.wait()
cuda.kernel(9.0)
""")
    assert call.flags == Flag.DEVICE | Flag.ASYNC
    assert wait.flags == Flag.DEVICE | Flag.WAIT
    assert (call.duration_ns, wait.duration_ns) == (TRANSFER_NS, TRANSFER_NS - 3_000_000)
    assert wait.start_ns == call.start_ns + 3_000_000


def test_a_call_that_was_complete_before_its_wait_has_no_wait(run: Run) -> None:
    spans = run("""
work = dist.all_reduce(tensor, async_op=True)
cuda.kernel(30.0)
cuda.catch_up()
work.wait()
""")
    assert [span.flags for span in spans] == [Flag.DEVICE | Flag.ASYNC]


def test_nothing_is_recorded_before_the_device_has_passed_it(run: Run) -> None:
    (span,) = run("""
dist.all_reduce(tensor)
boundary(device_catches_up=False)
""")
    assert span.step == 0


def test_a_call_that_nobody_waits_for_is_open_until_it_is_complete(run: Run) -> None:
    (span,) = run("""
from paceline_wire.ring import RingReader
import glob, os
reader = RingReader(glob.glob(os.environ["PACELINE_RING_DIRECTORY"] + "/*.ring")[0])
progress = lambda: [(each.entered, each.left) for each in reader.view().groups]
dist.all_reduce(tensor, async_op=True)
boundary(device_catches_up=False)
assert progress() == [(1, 0)], progress()
cuda.kernel(30.0)
boundary()
assert progress() == [(1, 1)], progress()
reader.close()
""")
    assert span.flags == Flag.ASYNC


def test_the_calls_of_a_batch_share_its_work(run: Run) -> None:
    spans = run(BATCH + "cuda.kernel(1.0); work.wait()")
    calls = [span for span in spans if span.flags == Flag.DEVICE | Flag.ASYNC]
    waits = [span for span in spans if span.flags == Flag.DEVICE | Flag.WAIT]
    assert sorted(span.op for span in calls) == sorted(span.op for span in waits)
    assert sorted(span.op for span in calls) == [Op.SEND, Op.RECV]
    assert {span.duration_ns for span in calls} == {TRANSFER_NS}
    assert {span.duration_ns for span in waits} == {TRANSFER_NS - 1_000_000}
    assert {span.peer for span in spans} == {1}


def test_a_batch_without_a_wait_is_recorded_once_it_is_complete(run: Run) -> None:
    spans = run(BATCH + "cuda.kernel(30.0)")
    assert [span.flags for span in spans] == [Flag.ASYNC] * 2


def test_a_capture_has_no_events_and_no_queries(run: Run) -> None:
    spans = run("""
before = dist.all_reduce(tensor, async_op=True)
cuda.kernel(30.0)
cuda.catch_up()
cuda.capture(True)
dist.all_reduce(tensor)
during = dist.all_reduce(tensor, async_op=True)
during.wait()
before.wait()
next(steps)
cuda.capture(False)
""")
    assert {span.sequence for span in spans} == {1, 2, 3}
    in_capture = [span for span in spans if span.sequence in (2, 3)]
    assert not any(span.flags & Flag.DEVICE for span in in_capture)


def test_events_are_used_again(run: Run) -> None:
    spans = run("""
for _ in range(50):
    for _ in range(10):
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
    boundary()
""")
    blocking = [span for span in spans if span.flags == Flag.DEVICE]
    assert len(blocking) >= 500
    assert {span.duration_ns for span in blocking} == {TRANSFER_NS}
