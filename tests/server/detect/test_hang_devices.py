"""Hung jobs whose culprit waits for its GPU, and those whose GPU only looks busy."""

from __future__ import annotations

import pytest
from simulated_job import DP, JOB, TP, SimulatedJob

from paceline_server.detect.finding import Finding
from paceline_server.engine.engine import Engine
from paceline_server.policy import Policy
from paceline_wire.batch import RankStackTraces, RankState, Sample
from paceline_wire.ring import Frame, GroupProgress
from paceline_wire.spans import Op
from paceline_wire.stacks import StackFrame, ThreadStack
from paceline_wire.topology import Topology

GPU_UTIL = "DCGM_FI_DEV_GPU_UTIL"
OWN, OTHERS = "paceline_rank_gpu_utilization_ratio", "paceline_rank_gpu_other_processes"
CULPRIT, NODE, GPU = 2, "node-1", "0"
WAITS = "waits for its GPU"
IN_HOST = "stuck in host code: between operations"


class Stuck:
    """A job in which all ranks but the culprit are in a collective that it has not entered."""

    def __init__(self, topology: Topology | None = None, culprit: int = CULPRIT) -> None:
        # The culprit uses a CPU: these limits for code that records nothing are tested elsewhere.
        policy = Policy(hang_evaluation_seconds=2.4, hang_busy_seconds=2.4)
        self.job = SimulatedJob(topology, seed=1, engine=Engine(JOB, policy))
        self.job.advance(10)
        self.culprit = culprit
        self.launched = dict.fromkeys(self.job.ranks, (5, 2))  # by rank: in TP, in DP
        self.launched[culprit] = (4, 2)

    def state(self, rank: int) -> RankState:
        at_ns = self.job.now_ns - self.job.offset_ns(0)
        tp, dp = self.launched[rank]
        frames = [Frame(Op.STEP, at_ns, 0, None, 0)]
        if rank != self.culprit:
            is_tp = rank in self.job.members(self.culprit, TP)
            group, sequence = (TP, tp) if is_tp else (DP, dp + 1)
            dp += not is_tp
            frames.append(Frame(Op.ALL_REDUCE, at_ns, group, None, sequence))
        groups = [
            GroupProgress(TP, tp, tp, at_ns, Op.ALL_REDUCE),
            GroupProgress(DP, dp, dp, at_ns, Op.ALL_REDUCE),
        ]
        return self.job.state(rank, frames=frames, groups=groups, process_state="R")

    def hang(self, **values: list[float]) -> Finding:
        """Return the hang. `values`: metric -> its value of the culprit in each half second."""
        states = {rank: self.state(rank) for rank in self.job.ranks}
        names = {"gpu": GPU_UTIL, "own": OWN, "others": OTHERS}
        node = self.job.node(self.culprit)
        of_gpu = {"gpu": str(self.culprit % self.job.ranks_per_node)}
        of_rank = {"job": "job-simulated", "rank": str(self.culprit)}
        for half_second in range(12):
            for key, series in values.items():
                value = series[min(half_second, len(series) - 1)]
                labels = of_gpu if key == "gpu" else of_rank
                sample = Sample(names[key], labels, value, self.job.now_ns)
                self.job.engine.feed(self.job.batch(node, samples=[sample]), self.job.now_ns)
            for outcome in self.job.wait(0.5, states):
                for found in outcome.findings:
                    if found.kind == "hang":
                        return found
        raise AssertionError("no hang was reported")


def test_a_culprit_whose_gpu_is_busy_all_the_while_waits_for_it():
    found = Stuck().hang(gpu=[100.0])
    assert (found.rank, found.cause, found.side) == (CULPRIT, WAITS, "device")
    assert found.summary == (
        "Rank 2 (node-1) is hung and blocks the job: it waits for its GPU, which does not finish "
        "its work."
    )
    assert "gpu0 of node-1 has been busy all the while (100%)" in [
        line.text for line in found.evidence
    ]


def test_a_single_rank_that_waits_in_loss_item_is_named_with_its_line():
    """As recorded on an H200: rank 0 of one waited in `loss.item()` for a kernel without end."""
    stuck = Stuck(Topology(1, 1, 1), culprit=0)
    stuck.launched[0] = (306, 306)
    found = stuck.hang(gpu=[100.0])
    assert (found.rank, found.cause, found.side) == (0, WAITS, "device")
    frames = [StackFrame(function="<module>", file="fault.py", line=31)]
    thread = ThreadStack(name="MainThread", frames=frames, holds_gil=False, is_running=True)
    stacks = RankStackTraces(
        time_ns=stuck.job.now_ns, job="job-simulated", generation=0, rank=0, pid=984,
        threads=[thread],
    )  # fmt: skip
    stuck.job.engine.feed(stuck.job.batch("node-0", events=[stacks]), stuck.job.now_ns)
    [reported] = stuck.job.tick(stuck.job.now_ns).findings
    assert reported.summary.endswith(
        "it waits for its GPU, which does not finish its work (fault.py:31 <module>)."
    )


@pytest.mark.parametrize("gpu", [[0.0], [50.0], [100.0, 100.0, 0.0], [100.0, 60.0, 100.0]], ids=str)
def test_a_culprit_whose_gpu_becomes_idle_is_stuck_in_host_code(gpu):
    """A script that loops on the CPU leaves its GPU idle once the launched work is done."""
    found = Stuck().hang(gpu=gpu)
    assert (found.rank, found.cause, found.side) == (CULPRIT, IN_HOST, "host")


def test_without_samples_of_the_gpu_the_culprit_is_in_host_code():
    found = Stuck().hang()
    assert (found.rank, found.cause, found.side) == (CULPRIT, IN_HOST, "host")


def test_a_gpu_that_may_wait_for_others_in_a_collective_proves_nothing():
    """Rank 2 launched one more all_reduce of its DP group and then stopped: NCCL's kernel keeps its
    GPU busy until rank 0 enters it too, which waits for rank 1."""
    stuck = Stuck()
    stuck.launched[CULPRIT] = (4, 3)
    for rank in stuck.job.members(CULPRIT, DP):
        if rank != CULPRIT:
            stuck.launched[rank] = (5, 1)
    found = stuck.hang(gpu=[100.0])
    assert WAITS not in found.cause


def test_the_use_of_its_own_process_decides_on_a_gpu_that_several_use():
    found = Stuck().hang(gpu=[100.0], others=[3.0], own=[0.4])
    assert (found.rank, found.cause, found.side) == (CULPRIT, WAITS, "device")
    assert any("its process has used gpu0 of node-1" in line.text for line in found.evidence)
    found = Stuck().hang(gpu=[100.0], others=[3.0], own=[0.0])
    assert (found.rank, found.cause, found.side) == (CULPRIT, IN_HOST, "host")


def test_a_gpu_that_others_keep_busy_proves_nothing():
    found = Stuck().hang(gpu=[100.0], others=[3.0])
    assert (found.rank, found.cause, found.side) == (CULPRIT, IN_HOST, "host")
    assert any("but other processes use it as well" in line.text for line in found.evidence)


def test_a_hang_in_the_backward_pass_with_a_busy_gpu_is_on_the_device():
    """Its side was `host`, although its cause was `stuck in device`."""
    stuck = Stuck()
    in_backward = stuck.state(CULPRIT)
    at_ns = stuck.job.now_ns - stuck.job.offset_ns(0)
    frames = [Frame(Op.STEP, at_ns, 0, None, 0), Frame(Op.BACKWARD, at_ns, 0, None, 0)]
    groups = in_backward.view.groups
    backward = stuck.job.state(CULPRIT, frames=frames, groups=groups)
    usual = stuck.state
    stuck.state = lambda rank: backward if rank == CULPRIT else usual(rank)
    found = stuck.hang(gpu=[100.0])
    assert (found.rank, found.cause, found.side) == (CULPRIT, "stuck in device: backward", "device")
