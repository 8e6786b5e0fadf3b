"""Loops that mark nothing and whose ranks seldom wait for each other."""

import numpy as np
import pytest
from msgspec.structs import replace
from simulated_job import SimulatedJob

from paceline_server.detect.finding import Finding
from paceline_server.engine.engine import Engine
from paceline_server.engine.types import Placement
from paceline_server.steps.types import Ledger
from paceline_wire.batch import Batch, RankDefined, SpanBlock
from paceline_wire.ring import RankDescription
from paceline_wire.spans import NONE_16, NONE_32, RECORD, Op, to_columns
from paceline_wire.topology import Topology

START_NS = 1_700_000_000_000_000_000
MS = 1_000_000
RANKS = 3

# Op, begin and end in ms since the start of its step, and the sequence of a collective.
Row = tuple[int, float, float] | tuple[int, float, float, int]


class BareLoop:
    """A job of a few ranks, each with a clock of its own between collectives."""

    def __init__(self, ranks: int = RANKS) -> None:
        self.engine = Engine("job")
        self.ranks, self.generation = ranks, -1
        self.restart()
        self.chance = np.random.default_rng(1)
        self.step = 0
        self.ends_ns = [START_NS] * ranks
        self.ledger = Ledger()
        self.step_seconds: float | None = None

    def restart(self) -> None:
        """Begin the next generation."""
        self.generation += 1
        self.engine.place(
            Placement(
                generation=self.generation,
                topology=Topology(dp=self.ranks),
                nodes=dict.fromkeys(range(self.ranks), "node"),
                gpus={},
                metadata={"flops_per_step": "1"},
                started_ns=START_NS,
            )
        )

    def advance(self, ranks: list[list[Row]], **metadata: str) -> list[Finding]:
        """Play one step of the spans of each rank; the last one is its STEP.

        `metadata`: what rank 0 reports after it.
        """
        blocks = []
        for rank, spans in enumerate(ranks):
            records = b"".join(self._record(rank, at, row) for at, row in enumerate(spans))
            self.ends_ns[rank] += int(spans[-1][2] * MS)
            blocks.append(
                SpanBlock(
                    job="job",
                    generation=self.generation,
                    rank=rank,
                    columns=to_columns(records),
                    clock_offset_ns=0,
                )
            )
        now_ns = max(self.ends_ns)
        batch = Batch(
            agent_id="node",
            boot_id="boot",
            sequence=self.step,
            packed_ns=now_ns,
            events=[self._described(now_ns, metadata)] if metadata else [],
            spans=blocks,
        )
        self.step += 1
        self.engine.feed(batch, now_ns)
        outcome = self.engine.tick(now_ns)
        self.ledger, self.step_seconds = outcome.ledger, outcome.step_seconds
        return outcome.findings

    def statuses(self, reported: str) -> list[str]:
        """Return the status of each rank if all report this one."""
        now_ns = max(self.ends_ns)
        state = SimulatedJob(seed=1).state(0, status=reported)
        states = [
            replace(state, time_ns=now_ns, job="job", generation=self.generation, rank=rank)
            for rank in range(self.ranks)
        ]
        batch = Batch(
            agent_id="node", boot_id="boot", sequence=0, packed_ns=now_ns, events=[*states]
        )
        self.engine.feed(batch, now_ns)
        return [rank.status for rank in self.engine.tick(now_ns).progress]

    def _described(self, now_ns: int, metadata: dict[str, str]) -> RankDefined:
        return RankDefined(
            time_ns=now_ns,
            job="job",
            generation=self.generation,
            rank=0,
            definitions=[],
            descriptions=[RankDescription(source="optimizer", metadata=metadata)],
        )

    def _record(self, rank: int, at: int, row: Row) -> bytes:
        op, begin, end, *sequence = row
        place = NONE_16, 0, self.step, NONE_32, NONE_32, 0
        start_ns = self.ends_ns[rank] + int(begin * MS)
        number = 100 * self.step + at
        called = sequence[0] if sequence else 0
        return RECORD.pack(number, op, 0, *place, 0, called, start_ns, int((end - begin) * MS))


def step(compute: float, optimizer: float) -> list[Row]:
    end = compute + optimizer
    return [(Op.OPTIMIZER, compute, end), (Op.STEP, 0, end)]


def test_a_slow_optimizer_is_found_in_steps_without_collectives() -> None:
    job = BareLoop()
    found: list[Finding] = []
    for number in range(60):
        compute = job.chance.normal(300.0, 3.0, RANKS)
        optimizer = [30.0, 30.0 + 120.0 * (number >= 50), 30.0]
        found += job.advance([step(*times) for times in zip(compute, optimizer, strict=True)])
    [slow] = found
    assert (slow.kind, slow.rank) == ("straggler", 1)
    assert abs(slow.onset_step - 50) <= 1
    assert slow.slowdown == pytest.approx(450 / 330, rel=0.03)
    assert "(in its optimizer)" in slow.summary


def test_ranks_that_are_far_apart_in_their_steps_are_not_idle() -> None:
    """Rank 1 needs 450 ms for a step; the others need 330 and wait for it in each eighth one."""
    job = BareLoop()
    for number in range(64):
        behind = 8 * 120.0 if number % 8 == 7 else 0.0
        fast = step(300.0 + behind, 30.0)
        job.advance([fast, step(420.0, 30.0), fast])
    ledger = job.ledger
    assert ledger.wall_seconds == pytest.approx(64 * 0.450)
    assert ledger.idle_seconds + ledger.startup_seconds == pytest.approx(0.0, abs=0.001)
    assert ledger.optimizer_seconds == pytest.approx(64 * 0.030)
    assert job.step_seconds == pytest.approx((2 * 0.330 + 0.450) / 3)  # in seven of eight steps
    steps_per_second = ledger.efficiency.model_flops_per_second  # over the last 20 steps
    assert steps_per_second == pytest.approx(1 / 0.450, rel=0.05)


def test_the_steps_of_a_learner_count_if_its_actors_have_none() -> None:
    job = BareLoop()
    job.advance([step(300.0, 30.0)])
    assert job.statuses("starting") == ["starting"] * 3, "the others may still begin"
    for _ in range(64):
        job.advance([step(300.0, 30.0)])
    assert job.step_seconds == pytest.approx(0.330)
    assert job.ledger.optimizer_seconds > 0.0
    assert job.statuses("starting") == ["starting", "running", "running"]


@pytest.mark.parametrize("longer", ["generator", "compute", "network"])
def test_steps_that_wait_longer_for_a_rank_without_steps_name_it(longer: str) -> None:
    """Rank 2 generates what the others train with, and sends it to them in a collective."""
    job = BareLoop()
    found: list[Finding] = []
    for number in range(140):
        more = 300.0 if number >= 80 else 0.0
        compute = 200.0 + more * (longer == "compute")
        transfer = 20.0 + more * (longer == "network")
        arrived = 500.0 + more * (longer != "network")
        ended = arrived + transfer + job.chance.normal(0.0, 2.0)
        received = (Op.BROADCAST, compute, ended, number + 1)
        sent = (Op.BROADCAST, arrived, ended, number + 1)
        learner: list[Row] = [(Op.OPTIMIZER, 0.0, 30.0), received, (Op.STEP, 0.0, ended)]
        found += job.advance([learner, learner, [sent]])
    slow = [finding for finding in found if finding.kind == "slower_steps"]
    assert slow
    assert slow[-1].slowdown == pytest.approx(820 / 520, rel=0.05)
    assert slow[-1].onset_step == pytest.approx(80, abs=2)
    if longer != "generator":
        assert slow[-1].rank is None
        assert "rank 2" not in slow[-1].summary
        return
    assert (slow[-1].rank, slow[-1].node) == (2, "node")
    assert "mostly in waits for rank 2 (node), which has no steps of its own" in slow[-1].summary
    assert (
        slow[-1]
        .evidence[0]
        .text.startswith("waits for rank 2, which has no steps: 600 ms per step, 300 ms before")
    )
    assert slow[-1].profiles_wanted == [2]


@pytest.mark.parametrize("ranks", [1, RANKS])
@pytest.mark.parametrize("is_reported", [True, False])
def test_the_steps_of_another_model_are_not_slow(ranks: int, is_reported: bool) -> None:
    """The second model needs three times as long, and then one of its steps becomes slow."""
    job = BareLoop(ranks)
    found: list[Finding] = []
    for number in range(160):
        scale = (3.0 if number >= 60 else 1.0) * (1.5 if number >= 120 else 1.0)
        compute = scale * job.chance.normal(300.0, 3.0, ranks)
        other = {"trained_since_step": "60"} if is_reported and number == 60 else {}
        found += job.advance([step(each, 30.0) for each in compute], **other)
    slow = [finding for finding in found if finding.kind in ("straggler", "slower_steps")]
    onsets = {finding.onset_step for finding in slow}
    assert min(onsets) == pytest.approx(120 if is_reported else 60, abs=2)


def test_what_was_slow_with_the_former_model_is_over() -> None:
    job = BareLoop()
    for number in range(80):
        compute = job.chance.normal(300.0, 3.0, RANKS)
        compute[1] *= 1.5 if number >= 40 else 1.0
        job.advance([step(each, 30.0) for each in compute])
    job.advance([step(30.0, 30.0)] * RANKS)
    [over] = job.advance([step(30.0, 30.0)] * RANKS, trained_since_step="80")
    assert (over.kind, over.cleared) == ("straggler", True)
    assert over.summary == "The same processes train another model."


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_restart_is_not_compared_with_another_model(is_reported: bool) -> None:
    job = BareLoop()
    for number in range(60):
        other = {"trained_since_step": "30"} if is_reported and number == 30 else {}
        job.advance([step(300.0, 30.0)] * RANKS, **other)
    job.restart()
    found = [one for _ in range(60) for one in job.advance([step(600.0, 30.0)] * RANKS)]
    assert [one.kind for one in found] == ([] if is_reported else ["slower_steps"])


@pytest.mark.parametrize("is_recognized", [True, False])
@pytest.mark.parametrize("kind", ["straggler", "slow_data"])
@pytest.mark.parametrize("steps", [4, 12])
def test_an_evaluation_does_not_confirm_a_slow_rank(
    steps: int, kind: str, is_recognized: bool
) -> None:
    """Rank 1 is slow for some steps of 0.3 s, and then evaluates for 30 s, as the others do."""
    job = BareLoop()
    found: list[Finding] = []
    for number in range(60 + steps):
        late = [0.0, 150.0 if number >= 60 else 0.0, 0.0]
        compute = job.chance.normal(300.0, 3.0, RANKS)
        waits = job.chance.normal(5.0, 0.1, RANKS)
        if kind == "straggler":
            compute += late
        else:
            waits += late
        found += job.advance(
            [
                [(Op.DATA_WAIT, 0.0, wait), *((op, wait + a, wait + b) for op, a, b in rest)]
                for wait, rest in zip(waits, (step(each, 30.0) for each in compute), strict=True)
            ]
        )
    evaluation = [(Op.EVALUATE, 450.0, 30_450.0)] if is_recognized else []
    found += job.advance([[*evaluation, (Op.STEP, 0.0, 30_480.0)]] * RANKS)
    assert (kind in [one.kind for one in found]) == (steps >= 8)


def test_of_short_steps_a_part_is_analyzed_and_all_are_counted() -> None:
    """2,000 steps of 5 ms; rank 1 needs 9 ms in the second quarter, and 1 s for one step."""
    job = BareLoop(2)
    found: list[Finding] = []
    for number in range(2000):
        milliseconds = job.chance.normal(4.5, 0.1, 2)
        milliseconds[1] += 4.5 * (500 <= number < 1000) + 1000.0 * (number == 1750)
        ends = max(milliseconds) + 0.5
        found += job.advance(
            [[(Op.ALL_REDUCE, end, ends), (Op.STEP, 0, ends)] for end in milliseconds]
        )
    reports = [one for one in found if one.kind == "straggler"]
    assert {one.fingerprint for one in reports} == {"straggler:1"}
    assert [one for one in reports if one.cleared] == reports[-1:]
    straggler, stall = reports[0], next(one for one in found if one.kind == "transient_stall")
    assert straggler.onset_step == pytest.approx(500, abs=16)
    assert straggler.slowdown == pytest.approx(2.0, abs=0.1)
    assert (stall.rank, stall.onset_step) == (1, 1750)
    assert job.ledger.useful_steps == pytest.approx(2000, abs=8)
    # The mean over both ranks: which collectives meet is not known without process groups.
    lost = job.ledger.straggler_seconds + job.ledger.imbalance_seconds
    assert lost == pytest.approx(2.25 / 2, abs=0.1)
    assert job.ledger.idle_seconds < 0.1
