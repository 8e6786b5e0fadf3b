"""Frameworks and launchers without a callback for each step, run with their own plugs.

Each test runs a script that does not know Paceline, as two ranks on gloo, and reads their rings. A
framework that is not installed is skipped; `make campaign` installs all of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from paceline_wire.ending import Ending, read_ending
from paceline_wire.ring import STATE_STATUS, RingReader, Status
from paceline_wire.spans import Op, Span, unpack

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if not is_installed(name)]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def run(rings: Path, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose ranks write their rings to a folder."""
    rings.mkdir()
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE")}
    return subprocess.run(
        [str(part) for part in command],
        env={
            **inherited,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PACELINE_RING_DIRECTORY": str(rings),
            "OMP_NUM_THREADS": "1",
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=170,
    )


def torchrun(
    rings: Path, script: str, *arguments: str | Path, ranks: int = 2, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of this folder."""
    launch = (BIN / "torchrun", "--standalone", f"--nproc-per-node={ranks}", HERE / script)
    return run(rings, *launch, *arguments, **variables)


def readers(rings: Path, ranks: int = 2) -> list[RingReader]:
    """Open the rings in the order of the ranks."""
    found = sorted(map(RingReader, rings.glob("*.ring")), key=lambda each: each.identity.rank)
    assert [each.identity.rank for each in found] == list(range(ranks))
    return found


def spans_of(rings: Path) -> list[list[Span]]:
    """Return the spans of both ranks."""
    return [list(unpack(reader.read())) for reader in readers(rings)]


def steps_with(spans: list[Span], op: int) -> list[int]:
    return [span.step for span in spans if span.op == op]


@pytest.mark.campaign
@needs("torchtitan", "triton")
@pytest.mark.parametrize("way", ["variable", "plug"])
def test_torchtitan(tmp_path: Path, way: str) -> None:
    own = "torchtitan.observability.structured_logger.jsonl_handler.register_jsonl_handler"
    plug = {"TITAN_STRUCT_LOGGER_HANDLERS": f"{own},paceline.integrations.torchtitan.register"}
    options = {
        "training.steps": 4,
        "training.seq_len": 64,
        "training.local_batch_size": 2,
        "training.mixed_precision_param": "float32",
        "checkpoint.interval": 2,
        "validator.freq": 2,
        "validator.steps": 1,
        "validator.dataloader.dataset": "c4_test",
        "validator.dataloader.dataset_path": tmp_path / "assets" / "text",
        "dump_folder": tmp_path / "out",
    }
    finished = torchrun(
        tmp_path / "rings",
        "torchtitan_on_cpu.py",
        *(tmp_path / "assets", "--checkpoint.enable", "--validator.enable"),
        *(str(part) for name, value in options.items() for part in (f"--{name}", value)),
        TORCHDYNAMO_DISABLE="1",  # compiled attention has no backward pass on CPUs
        **(plug if way == "plug" else {"PACELINE": "1"}),
    )
    assert finished.returncode == 0, finished.stderr[-5000:]
    for spans in spans_of(tmp_path / "rings"):
        assert steps_with(spans, Op.STEP) == [1, 2, 3, 4]
        assert steps_with(spans, Op.OPTIMIZER) == [1, 2, 3, 4]
        assert set(steps_with(spans, Op.DATA_WAIT)) == {1, 2, 3, 4}
        assert {2, 4} <= set(steps_with(spans, Op.EVALUATE))
        long = [span.step for span in spans if span.op == Op.CHECKPOINT and span.duration_ns > 10e6]
        assert {2, 4} <= set(long)
        assert {1, 2, 3, 4} <= set(steps_with(spans, Op.REDUCE_SCATTER))


@pytest.mark.campaign
@needs("megatron.core", "psutil")
@pytest.mark.parametrize("pipeline_size", [1, 2])
def test_megatron_core(tmp_path: Path, pipeline_size: int) -> None:
    finished = torchrun(
        tmp_path / "rings",
        "megatron_ranks.py",
        str(pipeline_size),
        tmp_path / "checkpoint",
        PACELINE="1",
    )
    assert finished.returncode == 0, finished.stderr[-5000:]
    for spans in spans_of(tmp_path / "rings"):
        assert steps_with(spans, Op.STEP) == [0, 1, 2, 3, 4, 5]
        assert steps_with(spans, Op.EVALUATE) == [3]
        assert 5 in steps_with(spans, Op.CHECKPOINT)
        for op in (Op.FORWARD, Op.BACKWARD):
            passes = Counter((span.step, span.microbatch) for span in spans if span.op == op)
            assert passes == {(step, batch): 1 for step in range(6) for batch in range(4)}
        communicated = Op.ALL_REDUCE if pipeline_size == 1 else Op.RECV
        assert set(steps_with(spans, communicated)) >= set(range(6))
    if pipeline_size == 2:
        first, last = spans_of(tmp_path / "rings")
        for spans, order in ((first, "FFBFBFBB"), (last, "FBFBFBFB")):
            passes_of = [span for span in spans if span.op in (Op.FORWARD, Op.BACKWARD)]
            ordered = sorted((s for s in passes_of if s.step == 2), key=lambda s: s.start_ns)
            assert "".join("F" if span.op == Op.FORWARD else "B" for span in ordered) == order


@pytest.mark.campaign
@needs("megatron.core")
@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, "dp2 pp2 tp2"),
        ({"tensor_model_parallel_size": 2, "context_parallel_size": 2}, "dp2 tp2 cp2"),
        ({"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}, "dp2 pp2 ep2"),
    ],
    ids=["3D", "context", "expert"],
)
def test_the_topology_is_that_of_megatrons_parallel_state(
    tmp_path: Path, sizes: dict[str, int], axes: str
) -> None:
    finished = torchrun(
        tmp_path / "rings",
        "megatron_parallel_ranks.py",
        json.dumps(sizes),
        ranks=8,
        PACELINE="1",
    )
    assert finished.returncode == 0, finished.stderr[-5000:]
    metadata: dict[str, str] = {}
    for reader in readers(tmp_path / "rings", ranks=8):
        for description in reader.new_descriptions():
            metadata |= description.metadata
    assert metadata["topology"] == f"{axes} (from Megatron parallel state)"


@pytest.mark.campaign
@needs("ray.train")
@pytest.mark.parametrize("way", ["variable", "plug"])
def test_ray_train(tmp_path: Path, way: str) -> None:
    callback = "paceline.integrations.ray_train.RayTrainWorkers"
    plug = {"RAY_TRAIN_CALLBACKS": callback, "RAY_TRAIN_V2_ENABLED": "1"}
    variable = {"PACELINE": "1", "PACELINE_JOB": "ray-example", "RAY_TRAIN_V2_ENABLED": "1"}
    finished = run(
        tmp_path / "rings",
        *(sys.executable, HERE / "ray_script.py", tmp_path / "out"),
        **(plug if way == "plug" else variable),
    )
    assert finished.returncode == 0, finished.stderr[-5000:]
    for reader in readers(tmp_path / "rings"):
        assert (reader.identity.job, reader.identity.world_size) == ("ray-example", 2)
        spans = list(unpack(reader.read()))
        assert steps_with(spans, Op.STEP) == list(range(8))
        assert set(steps_with(spans, Op.BACKWARD)) == set(range(8))
        assert set(steps_with(spans, Op.ALL_REDUCE)) == set(range(8))


@pytest.mark.campaign
@needs("nemo_run")
def test_nemo_run(tmp_path: Path) -> None:
    finished = run(
        tmp_path / "rings",
        *(sys.executable, HERE / "nemo_run_script.py", HERE / "plain_ranks.py"),
        NEMORUN_HOME=str(tmp_path / "home"),
    )
    assert finished.returncode == 0, finished.stderr[-5000:]
    for reader in readers(tmp_path / "rings"):
        assert reader.identity.job.startswith("example_")
        reductions = [span for span in unpack(reader.read()) if span.op == Op.ALL_REDUCE]
        assert len(reductions) >= 10


@pytest.mark.campaign
@needs("mpi4py")
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="not installed: mpirun")
def test_mpi(tmp_path: Path) -> None:
    launch = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable)
    finished = run(tmp_path / "rings", *launch, HERE / "mpi_ranks.py", PACELINE="1")
    assert finished.returncode == 0, finished.stderr[-5000:]
    for reader in readers(tmp_path / "rings"):
        assert reader.identity.world_size == 2
        assert reader.identity.job.startswith("mpirun-")


@pytest.mark.parametrize(
    ("how", "expected", "error"),
    [
        ("raise", Ending(1), "ValueError: bad batch 17\n"),
        pytest.param("kill", Ending(signal=9), "", marks=pytest.mark.campaign),
        pytest.param("exit", Ending(77), "", marks=pytest.mark.campaign),
    ],
)
def test_torchrun_reports_the_rank_that_failed(
    tmp_path: Path, how: str, expected: Ending, error: str
) -> None:
    finished = torchrun(tmp_path / "rings", "plain_ranks.py", how, PACELINE="1", PACELINE_BUILD="0")
    assert finished.returncode == 1
    other, failed = (read_ending(each.path, os.getuid()) for each in readers(tmp_path / "rings"))
    assert failed is not None
    assert (failed.exit_code, failed.signal) == (expected.exit_code, expected.signal)
    assert failed.error.endswith(error)
    # The other one raised an error about its connection, or torchrun ended it.
    assert other is None or "peer" in other.error


def test_torchrun_reports_a_rank_that_fails_before_it_records(tmp_path: Path) -> None:
    """Its job has all ranks, so that a server shows it."""
    rings = tmp_path / "rings"
    finished = torchrun(rings, "plain_ranks.py", "early", PACELINE="1", PACELINE_BUILD="0")
    assert finished.returncode == 1
    found = readers(rings)
    other, failed = (read_ending(each.path, os.getuid()) for each in found)
    assert other is None, "torchrun has ended it"
    assert failed is not None
    assert (failed.exit_code, failed.signal) == (1, None)
    assert failed.error.endswith("ValueError: unknown optimizer 'adamv'\n")
    assert found[0].state[STATE_STATUS] != Status.FAILED, "it waits in init_process_group"
    assert found[1].state[STATE_STATUS] == Status.FAILED
    for each in found:
        assert each.identity.world_size == 2
        assert each.identity.metadata["script"] == "plain_ranks.py"
        assert each.identity.metadata["launcher"] == "torchrun"
