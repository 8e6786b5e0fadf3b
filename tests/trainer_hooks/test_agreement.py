"""Ranks that receive a request at different times act on it at the same step, or none does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from paceline.agreement import Agreement, Request
from paceline_wire.ring import AckStatus, Control, ControlKind
from tests.forked_python import ForkedPython

PROGRAM = Path(__file__).with_name("agreeing_rank.py")
SEEN, DONE, FAILED = AckStatus.SEEN, AckStatus.DONE, AckStatus.FAILED
CHECKPOINT, BOTH, STOP = (
    ControlKind.CHECKPOINT,
    ControlKind.CHECKPOINT_AND_STOP,
    ControlKind.STOP,
)


class Rank:
    """One rank's control page, its side of the agreement and its training loop."""

    def __init__(self, store: TCPStore | None, rank: int, size: int, **seconds: float) -> None:
        self.obstacle: str | None = None
        self.page: Control | None = None
        self.answered = 0
        self.acknowledged: list[tuple[int, int, int]] = []
        self.requests: list[Request] = []
        self.stopped_at: int | None = None
        self.step = 0
        own = None if store is None else PrefixStore("test", store.clone())
        self.agreement = Agreement(
            own,
            rank,
            size,
            self._pending,
            self._acknowledge,
            obstacle_to_stop=lambda: self.obstacle,
            **seconds,
        )

    def _pending(self) -> Control | None:
        page = self.page
        return None if page is None or page.command_id == self.answered else page

    def _acknowledge(self, command_id: int, status: int, step: int) -> None:
        self.acknowledged.append((command_id, status, step))
        if status != SEEN:
            self.answered = command_id

    def train(
        self,
        until: Callable[[], bool],
        *,
        seconds: float = 0.0005,
        succeeds: bool = True,
        stride: int = 1,
        before_step: Callable[[int], object] = lambda step: None,
        save: Callable[[], object] = lambda: None,
    ) -> int:
        """Train until a condition holds or a request stops it. Return the completed steps."""
        while not until():
            before_step(self.step)
            time.sleep(seconds)  # the work of the step
            self.step += 1
            if self.step % stride:
                continue
            request = self.agreement.at(self.step)
            if request is not None:
                self.requests.append(request)
                save()
                if self.agreement.finish(request, succeeds):
                    self.stopped_at = self.step
                    break
        self.agreement.leave()
        return self.step


class Job:
    """Ranks that train in threads of their own, with a store between them.

    The last of `others` ranks run elsewhere.
    """

    def __init__(self, size: int, *, others: int = 0, **seconds: float) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store = self.store if size > 1 else None
        self.ranks = [Rank(store, rank, size, **seconds) for rank in range(size - others)]
        self._threads = ThreadPoolExecutor(size)
        self.ending = threading.Event()
        self.running: list[Future[int]] = []

    def start(self, **options: Callable[[int], dict[str, object]]) -> None:
        """Start the loops; each option is a function of the rank."""
        for number, rank in enumerate(self.ranks):
            own = {name: make(number) for name, make in options.items()}
            until = own.pop("until", self.ending.is_set)
            self.running.append(self._threads.submit(rank.train, until, **own))  # type: ignore[arg-type]

    def command(self, command: Control, *ranks: int) -> None:
        """Put a command on the control pages of these ranks; default: of all."""
        for rank in ranks or range(len(self.ranks)):
            self.ranks[rank].page = command

    def end(self) -> None:
        self.ending.set()
        for running in self.running:
            running.result(timeout=60)
        for rank in self.ranks:
            rank.agreement.close()
        self._threads.shutdown()


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(size: int, **seconds: float) -> Job:
        made.append(Job(size, **seconds))
        return made[-1]

    yield make
    for each in made:
        each.end()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.005)


def final(rank: Rank) -> list[tuple[int, int, int]]:
    return [answer for answer in rank.acknowledged if answer[1] != SEEN]


def test_ranks_of_different_speed_act_at_the_same_step(job: Callable[..., Job]) -> None:
    ranks = job(4)
    ranks.start(seconds=lambda rank: 0.0002 * (1 + 5 * rank))
    wait_until(lambda: ranks.ranks[3].step > 3)
    ranks.command(Control(7, CHECKPOINT, 5), 2)  # the others learn it from the store
    wait_until(lambda: all(rank.requests for rank in ranks.ranks))
    (step,) = {rank.requests[0].step for rank in ranks.ranks}
    wait_until(lambda: all(final(rank) for rank in ranks.ranks))
    assert [final(rank) for rank in ranks.ranks] == [[(7, DONE, step)]] * 4
    ranks.command(Control(9, CHECKPOINT, 5), 0)  # the same request, received late
    wait_until(lambda: len(final(ranks.ranks[0])) == 2)
    assert final(ranks.ranks[0])[1] == (9, DONE, step)
    assert all(len(rank.requests) == 1 for rank in ranks.ranks), "it is executed once"


def test_a_target_in_the_future_is_kept(job: Callable[..., Job]) -> None:
    ranks = job(2)
    ranks.command(Control(7, STOP, 400))
    ranks.start()
    wait_until(lambda: all(rank.stopped_at for rank in ranks.ranks))
    assert [rank.stopped_at for rank in ranks.ranks] == [400, 400]


def test_without_a_request_nothing_is_written_to_the_store(job: Callable[..., Job]) -> None:
    ranks = job(2)
    before = ranks.store.num_keys()
    ranks.start()
    wait_until(lambda: all(rank.step > 200 for rank in ranks.ranks))
    assert ranks.store.num_keys() == before


def test_ranks_wait_for_one_that_evaluates_and_act_with_it(job: Callable[..., Job]) -> None:
    ranks, evaluated = job(3, dead_seconds=60.0), threading.Event()

    def evaluate(step: int) -> None:
        if step == 10:
            evaluated.wait()

    ranks.start(before_step=lambda rank: evaluate if rank == 0 else lambda step: None)
    wait_until(lambda: ranks.ranks[1].step > 20)
    ranks.command(Control(7, BOTH, 5))
    wait_until(lambda: ranks.ranks[1].acknowledged and ranks.ranks[2].acknowledged)
    agreed = ranks.ranks[1].acknowledged[0][2]
    evaluated.set()
    wait_until(lambda: all(rank.stopped_at for rank in ranks.ranks))
    assert [rank.stopped_at for rank in ranks.ranks] == [agreed] * 3


def test_a_loop_that_ends_before_the_step_calls_the_request_off(job: Callable[..., Job]) -> None:
    ranks = job(3, absent_seconds=0.1)
    ended = threading.Event()
    ranks.start(until=lambda rank: ended.is_set if rank == 2 else ranks.ending.is_set)
    wait_until(lambda: all(rank.step > 3 for rank in ranks.ranks))
    ended.set()
    ranks.running[2].result(timeout=60)
    ranks.command(Control(7, BOTH, 5))
    wait_until(lambda: all(final(rank) for rank in ranks.ranks))
    before = ranks.ranks[0].step
    wait_until(lambda: ranks.ranks[0].step > before + 10)  # training continues
    assert [final(rank)[0][:2] for rank in ranks.ranks] == [(7, FAILED)] * 3
    assert not any(rank.requests for rank in ranks.ranks)


def test_a_loop_that_begins_again_acts_with_the_others(job: Callable[..., Job]) -> None:
    ranks = job(2)
    ranks.start()
    wait_until(lambda: all(rank.step > 3 for rank in ranks.ranks))
    ranks.ending.set()
    for running in ranks.running:
        running.result(timeout=60)
    ranks.command(Control(7, BOTH, 5))
    ranks.ending.clear()
    ranks.start()
    wait_until(lambda: all(rank.stopped_at for rank in ranks.ranks))
    assert ranks.ranks[0].stopped_at == ranks.ranks[1].stopped_at


@pytest.fixture
def process() -> Iterator[Callable[[Job, int, int], ForkedPython]]:
    """Start a rank in a process of its own."""
    made: list[ForkedPython] = []

    def start(job: Job, rank: int, size: int) -> ForkedPython:
        made.append(ForkedPython([PROGRAM, job.store.port, rank, size], os.environ))
        wait_until(lambda: made[-1].output() == "trains\n")
        return made[-1]

    yield start
    for each in made:
        each.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_while_agreeing_blocks_no_other(
    job: Callable[..., Job],
    process: Callable[[Job, int, int], ForkedPython],
    number: signal.Signals,
) -> None:
    ranks = job(3, others=1, dead_seconds=6.0)  # the other rank polls the store once a second
    dying = process(ranks, 2, 3)
    ranks.start()
    dying.send_signal(number)
    ranks.command(Control(7, BOTH, 5))
    wait_until(lambda: all(final(rank) for rank in ranks.ranks))
    assert [final(rank)[0][:2] for rank in ranks.ranks] == [(7, FAILED)] * 2
    before = ranks.ranks[0].step
    wait_until(lambda: ranks.ranks[0].step > before + 10)  # training continues
    if number == signal.SIGSTOP:  # it was only slow: it takes part in the next request
        dying.send_signal(signal.SIGCONT)
        ranks.command(Control(8, BOTH, 6))
        wait_until(lambda: all(rank.stopped_at for rank in ranks.ranks))
        output, _ = dying.communicate(timeout=60)
        assert output == f"trains\nstopped at {ranks.ranks[0].stopped_at}\n"
        assert ranks.ranks[0].stopped_at == ranks.ranks[1].stopped_at


def test_a_withdrawn_request_is_executed_by_no_rank(job: Callable[..., Job]) -> None:
    ranks, blocked = job(2), threading.Event()
    ranks.start(before_step=lambda rank: lambda step: step == 5 and rank == 0 and blocked.wait())
    wait_until(lambda: ranks.ranks[1].step > 8)
    ranks.command(Control(7, BOTH, 5))
    wait_until(lambda: ranks.ranks[1].acknowledged)
    ranks.command(Control(8, ControlKind.CANCEL, 0))
    wait_until(lambda: all((8, DONE) in [a[:2] for a in rank.acknowledged] for rank in ranks.ranks))
    blocked.set()
    before = [rank.step for rank in ranks.ranks]
    wait_until(lambda: all(rank.step > b + 5 for rank, b in zip(ranks.ranks, before, strict=True)))
    assert not any(rank.requests for rank in ranks.ranks)
    assert (7, FAILED) in [answer[:2] for answer in ranks.ranks[1].acknowledged]


@pytest.mark.parametrize("size", [1, 2])
def test_no_rank_stops_after_a_save_during_which_the_request_was_withdrawn(
    job: Callable[..., Job], size: int
) -> None:
    ranks, saved = job(size), threading.Event()
    ranks.start(save=lambda rank: saved.wait)
    wait_until(lambda: all(rank.step > 3 for rank in ranks.ranks))
    ranks.command(Control(7, BOTH, 5))
    wait_until(lambda: all(rank.requests for rank in ranks.ranks))
    ranks.command(Control(8, ControlKind.CANCEL, 0))
    wait_until(lambda: all((8, DONE) in [a[:2] for a in rank.acknowledged] for rank in ranks.ranks))
    saved.set()
    before = [rank.step for rank in ranks.ranks]
    wait_until(lambda: all(rank.step > b + 5 for rank, b in zip(ranks.ranks, before, strict=True)))
    assert [final(rank)[0][:2] for rank in ranks.ranks] == [(7, FAILED)] * size


def test_no_rank_stops_on_a_command_if_nothing_would_start_one_of_them_again(
    job: Callable[..., Job],
) -> None:
    """The agent of rank 1 refuses the command, and that of rank 0 passes it on."""
    ranks = job(2)
    ranks.ranks[1].obstacle = "its torchrun is gone"
    ranks.start()
    wait_until(lambda: all(rank.step > 3 for rank in ranks.ranks))
    ranks.command(Control(7, BOTH, 5), 0)
    wait_until(lambda: final(ranks.ranks[0]))
    assert final(ranks.ranks[0])[0][:2] == (7, FAILED)
    before = [rank.step for rank in ranks.ranks]
    wait_until(lambda: all(rank.step > b + 5 for rank, b in zip(ranks.ranks, before, strict=True)))
    ranks.ranks[1].agreement.request(BOTH)  # the script itself may stop
    wait_until(lambda: all(rank.stopped_at for rank in ranks.ranks))


def test_if_one_rank_cannot_save_no_rank_stops(job: Callable[..., Job]) -> None:
    ranks = job(3)
    ranks.start(succeeds=lambda rank: rank != 1)
    wait_until(lambda: all(rank.step > 3 for rank in ranks.ranks))
    ranks.command(Control(7, BOTH, 5))
    wait_until(lambda: all(final(rank) for rank in ranks.ranks))
    assert [final(rank)[0][:2] for rank in ranks.ranks] == [(7, FAILED)] * 3
    assert [rank.stopped_at for rank in ranks.ranks] == [None] * 3


def test_a_rank_may_check_only_every_few_steps(job: Callable[..., Job]) -> None:
    ranks = job(2)
    ranks.start(stride=lambda rank: 10)
    wait_until(lambda: all(rank.step > 30 for rank in ranks.ranks))
    ranks.command(Control(7, STOP, 5))
    wait_until(lambda: all(rank.stopped_at for rank in ranks.ranks))
    (step,) = {rank.stopped_at for rank in ranks.ranks}
    assert step is not None
    assert step % 10 == 0


def test_a_rank_can_request_something_itself_again_and_again(job: Callable[..., Job]) -> None:
    ranks = job(2)
    ranks.start()
    wait_until(lambda: all(rank.step > 3 for rank in ranks.ranks))
    for count in (1, 2, 3):
        ranks.ranks[1].agreement.request(CHECKPOINT)
        wait_until(lambda count=count: all(len(rank.requests) == count for rank in ranks.ranks))
    first, second = ([request.step for request in rank.requests] for rank in ranks.ranks)
    assert first == second


def test_a_checkpoint_that_is_due_does_not_replace_a_stop(job: Callable[..., Job]) -> None:
    ranks = job(2)
    for kind in (BOTH, CHECKPOINT):  # SIGTERM, and at once the interval is over
        ranks.ranks[0].agreement.request(kind)
    ranks.start()
    wait_until(lambda: all(rank.stopped_at for rank in ranks.ranks))
    assert [request.kind for request in ranks.ranks[0].requests] == [BOTH]


def test_a_command_that_no_script_executes_is_refused(job: Callable[..., Job]) -> None:
    ranks = job(2)
    ranks.start()
    ranks.command(Control(7, ControlKind.PROFILE, 5))
    wait_until(lambda: all(final(rank) for rank in ranks.ranks))
    assert [final(rank)[0][:2] for rank in ranks.ranks] == [(7, FAILED)] * 2


@pytest.mark.parametrize("kind", [CHECKPOINT, STOP])
def test_one_rank_alone_acts_at_its_next_step(kind: int) -> None:
    rank, ending = Rank(None, 0, 1), threading.Event()
    thread = threading.Thread(target=rank.train, args=(ending.is_set,))
    thread.start()
    wait_until(lambda: rank.step > 3)
    rank.page = Control(7, kind, 5)
    wait_until(lambda: final(rank))
    ending.set()
    thread.join()
    rank.agreement.close()
    assert final(rank) == [(7, DONE, rank.requests[0].step)]
    assert (rank.stopped_at is not None) == (kind == STOP)
