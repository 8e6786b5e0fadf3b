"""Which of the ranks that agents found form one run, on both databases."""

from __future__ import annotations

from msgspec.structs import replace

from paceline_server.store import attachments
from paceline_server.store.attachments import PendingRun
from paceline_server.store.database import Database
from paceline_server.store.models import NodeRow
from paceline_wire.batch import RankAttached, RankExited
from paceline_wire.ring import Identity
from paceline_wire.topology import Topology


class Found:
    """The ranks of a job as one agent reports them; each call is at a later time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._now_ns = 0
        self._events: list[tuple[str, RankAttached]] = []

    def run(
        self,
        world_size: int,
        ranks: range,
        agent_id: str = "node-0",
        generation: int = 0,
        *,
        is_reserved: bool = False,
    ) -> None:
        self._now_ns += 1
        for rank in ranks:
            topology = Topology(dp=world_size)
            identity = Identity(
                job="local",
                generation=generation,
                rank=rank,
                local_rank=rank,
                world_size=world_size,
                topology=topology,
                coordinates=topology.coordinates(rank),
                pid=100 * self._now_ns + rank,
                host="host",
                clock_offset_ns=0,
                started_ns=self._now_ns,
                is_reserved=is_reserved,
            )
            self._tell(agent_id, RankAttached(time_ns=self._now_ns, identity=identity))

    def see(self, agent_id: str) -> None:
        """Receive something from a node, six seconds later."""
        self._now_ns += 6_000_000_000
        with self._database.write() as session:
            session.merge(
                NodeRow(
                    agent_id=agent_id,
                    boot_id="boot",
                    sequence=0,
                    packed_ns=self._now_ns,
                    last_seen_ns=self._now_ns,
                    readings={},
                    dropped_batches=0,
                )
            )

    def report_again(self) -> None:
        """Report the ranks again, as restarted agents do."""
        for agent_id, event in list(self._events):
            self._tell(agent_id, event)

    def _tell(self, agent_id: str, event: RankAttached) -> None:
        self._events.append((agent_id, event))
        with self._database.write() as session:
            attachments.record_attached(session, agent_id, event, self._now_ns)

    def begin(self, rank: int) -> None:
        """Have a rank record whose ring was reserved: it is the same process."""
        agent_id, event = next(each for each in self._events if each[1].identity.rank == rank)
        self._tell(agent_id, replace(event, identity=replace(event.identity, is_reserved=False)))

    def is_loading(self) -> bool:
        (gathered,) = self.whole()
        with self._database.read() as session:
            return attachments.is_loading(session, gathered)

    def exit(self, pid: int, rank: int, exit_code: int | None = None) -> None:
        self._now_ns += 1
        event = RankExited(
            time_ns=self._now_ns,
            job="local",
            generation=0,
            rank=rank,
            pid=pid,
            exit_code=exit_code,
        )
        with self._database.write() as session:
            attachments.record_exit(session, "node-0", event, self._now_ns)

    def give_up(self, before_ns: int) -> None:
        with self._database.write() as session:
            attachments.discard_ended(session, before_ns)

    def whole(self) -> list[PendingRun]:
        with self._database.read() as session:
            return [each for each in attachments.pending_runs(session) if each.is_complete]

    def incomplete(self) -> list[PendingRun]:
        with self._database.read() as session:
            return attachments.pending_runs(session)

    def pid(self, agent_id: str) -> int:
        return next(event.identity.pid for agent, event in self._events if agent == agent_id)

    def take(self) -> list[int]:
        (gathered,) = self.whole()
        with self._database.write() as session:
            return [each.identity.pid for each in attachments.claim(session, gathered)]


def test_smaller_run_of_the_same_name_gets_its_own_ranks(database: Database) -> None:
    found = Found(database)
    found.run(4, range(4))
    assert found.take() == [100, 101, 102, 103]
    found.run(2, range(2))
    assert found.take() == [200, 201]
    assert found.whole() == []


def test_incomplete_run_does_not_block_a_smaller_complete_one(database: Database) -> None:
    found = Found(database)
    found.run(8, range(4))
    found.run(2, range(2))
    assert found.take() == [200, 201]


def test_rank_that_exited_early_is_not_part_of_the_next_run(database: Database) -> None:
    found = Found(database)
    found.run(2, range(1))
    found.exit(100, rank=0)
    found.give_up(before_ns=3)
    found.run(2, range(1, 2))
    assert found.whole() == []
    found.exit(100, rank=0)  # the exit is repeated, for a process that is long gone
    found.run(2, range(1))
    assert found.take() == [500, 301]


def test_rank_that_exited_recently_still_counts_for_its_run(database: Database) -> None:
    """This way a run that crashes in its first seconds is displayed too."""
    found = Found(database)
    found.run(2, range(1))
    found.exit(100, rank=0)
    found.give_up(before_ns=2)
    found.run(2, range(1, 2))
    assert found.take() == [100, 301]


def test_nodes_may_report_different_generations(database: Database) -> None:
    found = Found(database)
    found.run(3, range(1))
    found.run(3, range(1, 3), "node-1", generation=4)
    (gathered,) = found.whole()
    assert gathered.generation == 4
    assert found.take() == [100, 201, 202]
    assert found.whole() == []


def test_node_has_ranks_of_its_newest_generation_only(database: Database) -> None:
    found = Found(database)
    found.run(2, range(1))
    found.run(2, range(1), generation=1)
    found.run(2, range(1), "node-1")
    assert found.whole() == [], "rank 0 twice, rank 1 not yet"
    found.run(2, range(1, 2), "node-1", generation=1)
    found.report_again()
    assert found.take() == [200, 401]
    assert found.whole() == []


def test_run_of_which_no_rank_records_is_loading(database: Database) -> None:
    """A launcher may start other programs than trainings: a job is shown once a rank records."""
    found = Found(database)
    found.run(2, range(2), is_reserved=True)
    assert found.is_loading()
    found.exit(101, rank=1, exit_code=0)
    assert found.is_loading()
    found.begin(0)
    assert not found.is_loading()
    assert found.take() == [100, 101]
    found.begin(1)
    assert found.whole() == [], "the same process is no other run"


def test_failure_of_a_rank_that_loads_is_shown(database: Database) -> None:
    found = Found(database)
    found.run(2, range(2), is_reserved=True)
    found.exit(101, rank=1, exit_code=1)
    assert not found.is_loading()


def test_a_rank_of_a_lost_node_does_not_complete_the_next_generation(database: Database) -> None:
    found = Found(database)
    found.run(4, range(2, 4), "node-1")
    found.see("node-1")
    found.see("node-0")
    found.run(4, range(2), "node-0", generation=1)
    assert found.whole() == [], "ranks 2 and 3 have to be found on another node"
    found.run(4, range(2, 4), "node-2", generation=1)
    (run,) = found.whole()
    assert (run.generation, run.ranks) == (1, 4)


def test_nodes_that_respond_may_count_their_generations_differently(database: Database) -> None:
    found = Found(database)
    found.run(4, range(2, 4), "node-1")
    found.see("node-0")
    found.see("node-1")
    found.run(4, range(2), "node-0", generation=1)
    assert len(found.whole()) == 1


def test_a_late_report_of_a_lost_node_does_not_replace_the_rank_that_runs(
    database: Database,
) -> None:
    """The node is back, and its agent started again: the process still hangs there."""
    found = Found(database)
    found.run(2, range(1, 2), "node-1")
    for _ in range(11):
        found.see("node-0")
    found.run(2, range(1), "node-0")
    found.run(2, range(1, 2), "node-2")
    assert found.take() == [found.pid("node-0"), found.pid("node-2")]
    found.report_again()
    assert found.incomplete() == []
