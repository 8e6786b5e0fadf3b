"""Culprits of hangs: many random jobs, each blocked by one known fault.

HANG_SEEDS=1000:3000 pytest -m campaign -s --timeout 3600 tests/server/detect/test_hang_culprits.py
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from stuck_program import START_NS, Fault, Shape, StuckProgram

from paceline_server.detect.finding import Finding
from paceline_server.detect.hang.detector import HangDetector
from paceline_server.engine.engine import Engine
from paceline_server.engine.types import Placement
from paceline_wire.topology import Topology

KINDS = ("stop", "skip", "another_op", "another_size", "swap", "stray", "stall")
SIDES = {"stop": "host", "stall": "device"}  # all other kinds: mismatch
TOPOLOGIES = [
    Topology(dp, pp, tp)
    for dp in (1, 2, 3, 4)
    for pp in (1, 2, 4)
    for tp in (1, 2, 4)
    if 2 <= dp * pp * tp <= 32
]


@dataclass
class Case:
    program: StuckProgram
    fault: Fault
    mute: int | None = None  # a rank whose state page is no longer received

    def engine(self) -> Engine:
        ranks = list(self.program.ranks)
        engine = Engine("job-stuck", detectors=[HangDetector])
        engine.place(
            Placement(
                generation=0,
                topology=self.program.topology,
                nodes=dict.fromkeys(ranks, "node-0"),
                gpus=dict.fromkeys(ranks, 0 if self.program.shape.on_device else None),
                started_ns=START_NS,
            )
        )
        return engine

    def findings(self) -> list[Finding]:
        """Return the findings for complete steps followed by unchanged state pages."""
        program, engine = self.program, self.engine()
        ranks, now_ns = list(program.ranks), program.now_ns
        defined = [program.definitions(rank) for rank in ranks]
        pages = [program.page(rank, now_ns) for rank in ranks]
        engine.feed(program.batch(0, now_ns, [*defined, *pages], spans=True), now_ns)
        found = list(engine.tick(now_ns).findings)
        for number in range(1, 12):
            now_ns += 500_000_000
            pages = [program.page(rank, now_ns) for rank in ranks if rank != self.mute]
            engine.feed(program.batch(number, now_ns, [*pages], spans=False), now_ns)
            found += engine.tick(now_ns).findings
        return found

    def findings_while_running(self) -> list[Finding]:
        """Return the findings while the job runs: pages every 0.5 s, spans as they are written."""
        program, engine = self.program, self.engine()
        ranks = list(program.ranks)
        found: list[Finding] = []
        now_ns, number = START_NS, 0
        defined = [program.definitions(rank) for rank in ranks]
        engine.feed(program.batch(0, now_ns, [*defined], spans=False), now_ns)
        while program.play_until(now_ns + 500_000_000):
            now_ns, number = now_ns + 500_000_000, number + 1
            pages = [program.page(rank, now_ns) for rank in ranks]
            engine.feed(program.batch(number, now_ns, [*pages], spans=True), now_ns)
            found += engine.tick(now_ns).findings
        return found

    def is_right(self, finding: Finding) -> bool:
        if finding.side != SIDES.get(self.fault.kind, "mismatch"):
            return False
        if self.fault.kind != "stall":
            return finding.rank == self.fault.rank
        stalled = self.program.stalled
        assert stalled is not None
        if self.program.shape.on_device:  # no host knows which of the launched operations it is
            return finding.rank is None
        members = stalled[1:-2] if stalled[0] == 0 else stalled[1:-1]
        return finding.rank is None and set(finding.ranks) == set(members)


def a_case(seed: int, kind: str | None = None, *, on_device: bool = False) -> Case:
    """Return a random job that hangs."""
    chance = random.Random(seed)
    while True:
        shape = Shape(
            topology=chance.choice(TOPOLOGIES),
            microbatches=chance.choice((1, 2, 4)),
            overlapped=chance.random() < 0.5,
            sequence_parallel=chance.random() < 0.5,
            ends_with_world=chance.random() < 0.8,
            rendezvous=chance.random() < 0.5,
            varying=chance.random() < 0.3,
            on_device=on_device,
        )
        chosen = kind or chance.choice(KINDS)
        rank = chance.randrange(shape.topology.world_size)
        program = StuckProgram(shape, Fault("none")).program(rank)
        wanted = {
            "stop": ("host",),
            "skip": ("collective", "send", "receive", "launch"),
            "another_op": ("collective",),
            "another_size": ("collective",),
            "swap": ("collective", "send", "receive"),
            "stray": ("collective", "send", "receive"),
            "stall": ("collective", "receive"),
        }[chosen]
        places = [index for index, each in enumerate(program) if each.kind in wanted]
        if not places:
            continue
        fault = Fault(chosen, rank, chance.choice(places))  # type: ignore[arg-type]
        played = StuckProgram(shape, fault, seed=seed)
        if played.play():
            return Case(played, fault)


def judge(seeds: range, *, on_device: bool = False) -> tuple[Counter[str], Counter[str], list[str]]:
    """Return the numbers of correct and of all verdicts by kind, and a text for each wrong one."""
    kinds = ("stop", "stall") if on_device else KINDS
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    wrong = []
    for seed in seeds:
        case = a_case(seed, kinds[seed % len(kinds)], on_device=on_device)
        found = case.findings()
        total[case.fault.kind] += 1
        if len(found) == 1 and case.is_right(found[0]):
            right[case.fault.kind] += 1
        else:
            verdicts = [(each.rank, each.side, each.cause, each.ranks) for each in found]
            wrong.append(f"seed {seed}: {case.fault} {case.program.shape}: {verdicts}")
    return right, total, wrong


def check(seeds: range, on_device: bool) -> None:
    right, total, wrong = judge(seeds, on_device=on_device)
    share = right.total() / total.total()
    print(f"{share:.1%} of {total.total()} right; by kind: {dict(right)} of {dict(total)}")
    assert share >= 0.98, "\n".join(wrong)


@pytest.mark.parametrize(("on_device", "count"), [(False, 36), (True, 12)])
def test_the_culprit_and_its_side(on_device: bool, count: int) -> None:
    check(range(100, 100 + count), on_device)


@pytest.mark.campaign
@pytest.mark.parametrize("on_device", [False, True])
def test_the_culprit_and_its_side_on_many_seeds(on_device: bool) -> None:
    begin, _, end = os.environ.get("HANG_SEEDS", "1000:1600").partition(":")
    check(range(int(begin), int(end)), on_device)


def test_a_skipped_collective_names_the_rank_that_skipped_it() -> None:
    shape = Shape(Topology(dp=1, pp=1, tp=2), microbatches=1)
    program = StuckProgram(shape, Fault("skip", rank=1, index=4))
    assert program.play()
    [found] = Case(program, program.fault).findings()
    assert (found.rank, found.side) == (1, "mismatch")
    assert found.cause == "mismatched collective: collectives of tp left out or overtaken"
    texts = " ".join(each.text for each in found.evidence)
    assert "rank 1 entered 1 fewer collective of tp than at this point" in texts


def test_two_stopped_hosts_are_both_named() -> None:
    shape = Shape(Topology(dp=2, pp=1, tp=2))
    program = StuckProgram(shape, Fault("stop", rank=1, index=1))
    program.also_stopped = {2}
    assert program.play()
    [found] = Case(program, program.fault).findings()
    assert (found.side, found.ranks) == ("host", [1, 2])


def test_a_rank_without_a_page_is_blamed_only_without_another_culprit() -> None:
    shape = Shape(Topology(dp=2, pp=1, tp=2))
    for mute, culprit in ((3, 1), (1, 1)):
        program = StuckProgram(shape, Fault("stop", rank=1, index=1))
        assert program.play()
        [found] = Case(program, program.fault, mute=mute).findings()
        assert (found.rank, found.side) == (culprit, "host")
        assert (found.cause == "process gone") == (mute == culprit)


def test_a_mismatch_of_two_ranks_names_both_operations() -> None:
    shape = Shape(Topology(dp=1, pp=1, tp=2))
    program = StuckProgram(shape, Fault("another_op", rank=1, index=2))
    assert program.play()
    [found] = Case(program, program.fault).findings()
    assert (found.rank, found.cause) == (1, "mismatched collective: another operation")
    texts = [each.text for each in found.evidence]
    assert "rank 1 entered broadcast tp#33 of 2048 bytes" in texts
    assert "rank 0 entered all_reduce tp#33 of 2048 bytes" in texts


@pytest.mark.parametrize("rank", range(4))
def test_a_collective_of_all_ranks_that_one_enters_alone_names_that_rank(rank: int) -> None:
    """No group has a majority: two stages of two replicas wait for each other."""
    shape = Shape(Topology(dp=2, pp=2), ends_with_world=False)
    program = StuckProgram(shape, Fault("stray", rank, index=1))
    assert program.play()
    [found] = Case(program, program.fault).findings()
    assert found.rank == rank
    assert found.summary.startswith(f"Rank {rank} ")


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("rank", range(3))
def test_a_rare_collective_that_one_rank_leaves_out_names_that_rank(
    rank: int, overlapped: bool
) -> None:
    """Overlapped, the rank launches more than one collective beyond the barrier of the others."""
    shape = Shape(Topology(dp=3), overlapped=overlapped, ends_with_world=False)
    program = StuckProgram(shape, Fault("miss", rank))
    assert program.play()
    [found] = Case(program, program.fault).findings()
    assert (found.rank, found.side) == (rank, "mismatch")


@pytest.mark.parametrize("seed", range(4))
def test_slow_but_alive_is_no_hang(seed: int) -> None:
    """One rank is a hundred times slower, so that all others wait seconds for it."""
    chance = random.Random(seed)
    shape = Shape(chance.choice(TOPOLOGIES), overlapped=bool(seed % 2))
    program = StuckProgram(shape, Fault("none"), whole_steps=6, seed=seed)
    program.slow = {chance.randrange(shape.topology.world_size): 100.0}
    assert Case(program, program.fault).findings_while_running() == []
