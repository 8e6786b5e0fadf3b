"""All efficiency figures of a run that was computed by hand (docs/efficiency.md).

Two data-parallel ranks train four steps. Times are milliseconds since the start of a step:

    healthy, both ranks             0    50   250            750 850 950 1000
                                    data forward backward    wait opt.  rest
      all-reduce 1 in flight                       400-700
      all-reduce 2 in flight                               700-850

    rank 1 computes at half speed   0    50   450           1450 1550 1650 1700
      all-reduce 1 in flight                       750-1050
      all-reduce 2 in flight                              1400-1550
    slow link, both ranks           0    50   250            750 1250 1350 1400
      all-reduce 1 in flight                       400-700
      all-reduce 2 in flight                               700-1250

    its peer, rank 0                0    50   250            750 1550 1650 1700
      all-reduce 1 in flight                       400-1050
      all-reduce 2 in flight                               700-1550
"""

from dataclasses import dataclass

import pytest
from msgspec.structs import replace
from simulated_job import SimulatedJob

from paceline_server.engine.engine import Engine
from paceline_server.engine.types import Outcome, Placement
from paceline_server.steps.types import Efficiency, MemoryUse
from paceline_wire.batch import Batch, RankDefined, SpanBlock
from paceline_wire.ring import GroupDefinition, RankDescription
from paceline_wire.spans import NONE_16, NONE_32, RECORD, Flag, MemoryKind, Op, to_columns
from paceline_wire.topology import Topology

START_NS = 1_700_000_000_000_000_000
MS = 1_000_000
# Model FLOPs: 1e12 per token. Two A100 have a peak of 2 x 312e12 per second.
METADATA = {
    "counted_from": "by hand",
    "flops_per_token": "1e12",
    "gpu_name": "NVIDIA A100-SXM4-80GB",
}

Row = tuple[int, int, int, int, int, int]  # op, begin and end in ms, flags, bytes, sequence


def rows(
    step: int, forward: int, backward: int, launched: tuple[int, int], done: tuple[int, int]
) -> list[Row]:
    """Return one step of one rank: 4 samples of 16 tokens."""
    ended = 50 + forward + backward
    group = 2 * step
    return [
        (Op.DATA_WAIT, 0, 50, 0, 0, 0),
        (Op.FORWARD, 50, 50 + forward, 0, 0, 0),
        (Op.BACKWARD, 50 + forward, ended, 0, 0, 0),
        (Op.ALL_REDUCE, launched[0], done[0], Flag.ASYNC, 1000, group + 1),
        (Op.ALL_REDUCE, launched[1], done[1], Flag.ASYNC, 1000, group + 2),
        (Op.ALL_REDUCE, ended, done[1], Flag.WAIT, 1000, group + 2),
        (Op.OPTIMIZER, done[1], done[1] + 100, 0, 0, 0),
        (Op.STEP, 0, done[1] + 150, 0, 64, 4),
    ]


HEALTHY = (200, 500, (400, 700), (700, 850))
SLOW = (400, 1000, (750, 1400), (1050, 1550))
SLOW_LINK = (200, 500, (400, 700), (700, 1250))
WAITING = (200, 500, (400, 700), (1050, 1550))


@dataclass
class Run:
    """The run as its agent sends it."""

    engine: Engine
    metadata: dict[str, str]
    now_ns: int = START_NS
    steps: int = 0

    def __post_init__(self) -> None:
        topology = Topology(dp=2)
        nodes: dict[int, str] = {0: "node", 1: "node"}
        self.engine.place(
            Placement(
                generation=0,
                topology=topology,
                nodes=nodes,
                gpus={0: 0, 1: 1},
                metadata=self.metadata,
                started_ns=START_NS,
            )
        )

    def step(self, *ranks: tuple[int, int, tuple[int, int], tuple[int, int]]) -> Outcome:
        spans = [rows(self.steps, *rank) for rank in ranks]
        outcome = self.send(spans, self.now_ns + max(row[2] for row in spans[0]) * MS)
        self.steps += 1
        return outcome

    def send(self, spans: list[list[Row]], until_ns: int) -> Outcome:
        blocks = [
            SpanBlock(
                job="job",
                generation=0,
                rank=rank,
                columns=to_columns(
                    b"".join(self._record(index, row) for index, row in enumerate(of))
                ),
                clock_offset_ns=self.now_ns,
            )
            for rank, of in enumerate(spans)
        ]
        group = GroupDefinition(0, "world", [0, 1], axis="world")
        defined = [
            RankDefined(time_ns=until_ns, job="job", generation=0, rank=rank, definitions=[group])
            for rank in (0, 1)
        ]
        batch = Batch(
            agent_id="node",
            boot_id="boot",
            sequence=self.steps,
            packed_ns=until_ns,
            events=[*defined],
            spans=blocks,
        )
        self.engine.feed(batch, until_ns)
        self.now_ns = until_ns
        return self.engine.tick(until_ns)

    def _record(self, index: int, row: Row) -> bytes:
        op, begin, end, flags, size, sequence = row
        place = NONE_16, flags, self.steps, NONE_32, NONE_32, 0
        index += 100 * self.steps
        return RECORD.pack(index, op, 0, *place, size, sequence, begin * MS, (end - begin) * MS)


@pytest.fixture
def run() -> Run:
    return Run(Engine("job"), METADATA)


def test_a_healthy_step(run: Run) -> None:
    """Compute 200 + 500 + 50 (the rest), exposed 100, optimizer 100, data 50 of 1000."""
    [step] = run.step(HEALTHY, HEALTHY).steps
    goodput = step.goodput
    assert step.duration_seconds == pytest.approx(1.0)
    assert goodput.compute_seconds == pytest.approx(0.75)
    assert goodput.communication_seconds == pytest.approx(0.1)
    assert goodput.straggler_seconds == goodput.peer_wait_seconds == 0
    # In flight 400-850, blocked 750-850.
    assert [rank.overlapped_seconds for rank in step.ranks] == pytest.approx([0.35, 0.35])
    assert (step.samples, step.tokens) == (8, 128)


def test_a_step_with_a_slower_rank(run: Run) -> None:
    """Rank 1 computes 1450 instead of 750: the step takes 700 more, 1 / 1.7 of it is needed.

    Its own work includes the optimizer's 100. Of the 700, 350 are the mean of the additional
    compute. Rank 0 waits 650 (800 less the 150 that all-reduce 2 takes after rank 1 launched
    it), 325 as a mean: 675 of the 700 were measured.
    """
    [step] = run.step(WAITING, SLOW).steps
    goodput = step.goodput
    assert step.duration_seconds == pytest.approx(1.7)
    assert [rank.self_seconds for rank in step.ranks] == pytest.approx([0.85, 1.55])
    assert goodput.imbalance_seconds == pytest.approx(0.675)
    assert goodput.straggler_seconds == 0  # none is reported
    assert goodput.compute_seconds == pytest.approx(0.75)
    assert goodput.communication_seconds == pytest.approx(0.125)  # (150 + 100) / 2
    assert goodput.peer_wait_seconds == pytest.approx(0)
    # Rank 0: in flight 400-1550, blocked 750-1550. Rank 1: 750-1050 and 1400-1550, less 1450-1550.
    assert [rank.overlapped_seconds for rank in step.ranks] == pytest.approx([0.35, 0.35])


def test_a_slow_link_costs_goodput_what_a_healthy_one_would_gain(run: Run) -> None:
    """The last 400 of a 1.4 s step are a transfer that took 100 before: 500 now, on both ranks.

    On the healthy link the step takes 1.0: 0.75 compute, 0.1 transfer, 0.1 optimizer, 0.05 data.
    """
    for _ in range(20):
        outcome = run.step(HEALTHY, HEALTHY)
    assert outcome.ledger.slow_link_seconds == 0
    for _ in range(8):
        outcome = run.step(SLOW_LINK, SLOW_LINK)
    [step] = outcome.steps
    goodput = step.goodput
    assert step.duration_seconds == pytest.approx(1.4)
    assert goodput.slow_link_seconds == pytest.approx(0.4, rel=0.01)
    assert goodput.communication_seconds == pytest.approx(0.1, rel=0.04)
    assert goodput.compute_seconds == pytest.approx(0.75)
    assert goodput.straggler_seconds == goodput.peer_wait_seconds == 0
    ledger = outcome.ledger
    counted = round(ledger.slow_link_seconds / 0.4)  # those after the report
    assert 1 <= counted < 8
    assert ledger.slow_link_seconds == pytest.approx(counted * 0.4, rel=0.01)
    useful = 28 * (0.75 + 0.1 + 0.1) + (8 - counted) * 0.4
    assert ledger.goodput_ratio == pytest.approx(useful / (20 * 1.0 + 8 * 1.4), rel=0.01)
    for _ in range(30):
        outcome = run.step(HEALTHY, HEALTHY)
    assert outcome.steps[0].goodput.slow_link_seconds == 0


def test_a_wait_for_the_last_rank_of_an_evaluation_is_no_idle_time(run: Run) -> None:
    """Rank 0 evaluates for 100 of 1000, waits 800 and exchanges 100; rank 1 evaluates for 900."""
    spans = [
        [
            (Op.EVALUATE, 0, 1000, 0, 0, 0),
            (Op.ALL_REDUCE, entered, 1000, 0, 8, 1),
            (Op.STEP, 0, 1100, 0, 0, 0),
        ]
        for entered in (100, 900)
    ]
    ledger = run.send(spans, START_NS + 1100 * MS).ledger
    assert ledger.peer_wait_seconds == pytest.approx(0.4)
    assert ledger.evaluation_seconds == pytest.approx(0.6)  # (200 + 1000) / 2
    assert ledger.idle_seconds == pytest.approx(0.0, abs=1e-6)
    assert ledger.compute_seconds == pytest.approx(0.1)


def test_the_ledger_and_the_efficiency_of_the_job(run: Run) -> None:
    """Two steps of 1.0 s and two of 1.7 s."""
    for ranks in ((HEALTHY, HEALTHY), (HEALTHY, HEALTHY), (WAITING, SLOW), (WAITING, SLOW)):
        outcome = run.step(*ranks)
    ledger = outcome.ledger
    assert ledger.wall_seconds == pytest.approx(5.4)
    assert ledger.compute_seconds == pytest.approx(4 * 0.75)
    assert ledger.communication_seconds == pytest.approx(2 * 0.1 + 2 * 0.125)
    assert ledger.imbalance_seconds == pytest.approx(2 * 0.675)
    assert ledger.optimizer_seconds == pytest.approx(4 * 0.1)
    assert ledger.data_wait_seconds == pytest.approx(4 * 0.05)
    assert ledger.goodput_ratio == pytest.approx((3.0 + 0.45 + 0.4) / 5.4)  # 71%
    assert (ledger.samples, ledger.tokens) == (32, 512)
    found = ledger.efficiency
    assert found.steps == 4
    assert found.samples_per_second == pytest.approx(32 / 5.4)
    assert found.tokens_per_second == pytest.approx(512 / 5.4)
    assert found.model_flops_per_second == pytest.approx(1e12 * 512 / 5.4)
    assert found.mfu_ratio == pytest.approx(1e12 * 512 / 5.4 / (2 * 312e12))  # 0.152
    assert found.mfu_unknown is None
    # Means over the ranks: 100, 100, 450 and 450 exposed of 5400; 350 overlapped in each step.
    assert found.exposed_communication_ratio == pytest.approx(1.1 / 5.4)
    assert found.overlapped_communication_ratio == pytest.approx(1.4 / 5.4)
    assert found.counted_from == "by hand"
    # Rank 0 was blocked 100 in each healthy step and 800 in the others, rank 1 always 100.
    by_rank = [rank.exposed_communication_ratio for rank in found.ranks]
    assert by_rank == pytest.approx([1.8 / 5.4, 0.4 / 5.4])


def test_bubbles_beyond_the_schedule() -> None:
    """GPipe, 2 stages, 8 microbatches of 20 + 40; stage 1 takes 1.5 times as long.

    Stage 1 starts after 20, computes 8 x 90, and stage 0 ends 40 later: the phase takes 780. Stage
    0 idles 300 of it, stage 1 idles 60, less 5 for its reduction (2) and optimizer (3). In theory
    1/9 of the phase is idle: 86.7, so 86.7 of stage 0 and 55 of stage 1 are scheduled, and 213.3
    are not, as a mean 106.7.
    """
    job = SimulatedJob(Topology(2, 2, 1), jitter=0.0)
    job.faults.stage_cost = {1: 1.5}
    goodput = job.advance(3)[-1].steps[-1].goodput
    assert goodput.straggler_seconds == 0
    # The simulated transfers add 0.4 to each idle time and to the phase.
    assert goodput.bubble_excess_seconds == pytest.approx(0.1067, rel=0.02)
    assert goodput.bubble_seconds == pytest.approx((0.0867 + 0.055) / 2, rel=0.02)


def test_the_memory_of_the_fullest_rank(run: Run) -> None:
    sizes = {
        MemoryKind.PARAMETERS: 100,
        MemoryKind.GRADIENTS: 100,
        MemoryKind.OPTIMIZER: 200,
        MemoryKind.ALLOCATED: 450,
        MemoryKind.RESERVED: 1000,
        MemoryKind.INACTIVE: 50,
        MemoryKind.PEAK: 900,
        MemoryKind.AFTER_FORWARD: 890,
    }
    less = [(Op.MEMORY, 0, 0, 0, 800, MemoryKind.PEAK)]
    more = [(Op.MEMORY, 0, 0, 0, size, kind) for kind, size in sizes.items()]
    run.send([less, more], run.now_ns)
    found = run.step(HEALTHY, HEALTHY).ledger.efficiency.memory
    assert found == MemoryUse(
        rank=1,
        parameters_bytes=100,
        gradients_bytes=100,
        optimizer_bytes=200,
        activations_bytes=500,  # 900 - 100 - 100 - 200
        allocated_bytes=450,
        reserved_bytes=1000,
        peak_bytes=900,
        fragmentation_ratio=0.05,  # 50 / 1000
        after_forward_bytes=890,
    )


def test_counted_flops_are_summed_over_the_ranks() -> None:
    """3e12 and 5e12 in a step of one second, of 2 x 1e13 per second."""
    run = Run(Engine("job"), {"peak_flops": "1e13"})
    counted = [[(Op.FLOPS, 0, 0, 0, flops, 0)] for flops in (3 * 10**12, 5 * 10**12)]
    run.send(counted, run.now_ns)
    assert run.step(HEALTHY, HEALTHY).ledger.efficiency.mfu_ratio == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"gpu_name": "NVIDIA H200"}, "the FLOPs of the model are not known"),
        ({"flops_per_step": "1e12"}, "the ranks report no GPU"),
        ({"flops_per_step": "1e12", "gpu_name": "New GPU"}, "the peak of New GPU is not known"),
        ({"flops_per_step": "many", "peak_flops": "nan"}, "the FLOPs of the model are not known"),
    ],
)
def test_an_unknown_mfu_has_its_reason(metadata: dict[str, str], reason: str) -> None:
    found = Run(Engine("job"), metadata).step(HEALTHY, HEALTHY).ledger.efficiency
    assert found.mfu_ratio is None
    assert found.mfu_unknown is not None
    assert found.mfu_unknown.startswith(reason)


@pytest.mark.parametrize(
    ("tokens", "samples", "counted"), [(64, 4, "token"), (0, 4, "sample"), (0, 0, "step")]
)
def test_an_unknown_mfu_asks_for_the_flops_of_what_is_counted(
    tokens: int, samples: int, counted: str
) -> None:
    run = Run(Engine("job"), {"gpu_name": "NVIDIA H200"})
    *spans, (op, begin, end, flags, *_) = rows(0, *HEALTHY)
    spans.append((op, begin, end, flags, tokens, samples))
    found = run.send([spans, spans], run.now_ns + end * MS).ledger.efficiency
    assert found.mfu_unknown is not None
    assert f"pass flops_per_{counted} to paceline.describe_model" in found.mfu_unknown


def test_the_figures_survive_a_change_of_worker(run: Run) -> None:
    before = run.step(HEALTHY, HEALTHY).ledger
    heir = Engine("job", memory=run.engine.memory())
    assert heir.tick(run.now_ns).ledger == before


def test_the_figures_of_another_number_of_ranks_end_with_its_generation(run: Run) -> None:
    before = run.step(HEALTHY, HEALTHY).ledger.efficiency
    placement = Placement(
        generation=1, topology=Topology(dp=2), nodes={}, gpus={}, metadata={}, started_ns=run.now_ns
    )
    run.engine.place(placement)
    assert run.engine.tick(run.now_ns).ledger.efficiency == before
    run.engine.place(replace(placement, generation=2, topology=Topology(dp=1)))
    assert run.engine.tick(run.now_ns).ledger.efficiency == Efficiency()


def test_metadata_that_ranks_find_out_later_counts(run: Run) -> None:
    run.step(HEALTHY, HEALTHY)
    description = RankDescription(source="script", metadata={"peak_flops": "1e15"})
    event = RankDefined(
        time_ns=run.now_ns,
        job="job",
        generation=0,
        rank=0,
        definitions=[],
        descriptions=[description],
    )
    later = Batch(agent_id="node", boot_id="boot", sequence=9, packed_ns=run.now_ns, events=[event])
    run.engine.feed(later, run.now_ns)
    found = run.step(HEALTHY, HEALTHY).ledger.efficiency
    assert found.mfu_ratio == pytest.approx(128e12 / 2e15)
