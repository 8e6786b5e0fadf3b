"""When copies are made: as often as the budget allows, at the same steps on all ranks.

Each rank measures what a copy costs. Rank 0 takes the greatest costs of all and writes a plan to
the store of torch.distributed, some steps ahead. Nothing waits for it: a rank that reads the plan
late makes a copy that the others lack, which a restart does not use. Before the first plan, copies
are made 2 to 8 steps after the start, then every second step up to 16, every fourth up to 32, ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import cycle, islice
from math import ceil, inf
from statistics import median
from time import monotonic

import msgspec

from paceline.agreement import RankStore

FIRST_SECONDS = 60.0  # after the first plan, in which costs still fall
FIRST_POLL_SECONDS = 0.5  # between polls of the store until there is a plan
REVISION_POLL_SECONDS = 2.0  # in FIRST_SECONDS
_RANKS_OF_FIRST_POLL = 512  # that may poll as often; more ranks poll as much less often
FIRST_POST_SECONDS = 10.0  # between the posts of a rank's costs in FIRST_SECONDS
POLL_SECONDS = 10.0
POST_SECONDS = 60.0
_STEPS_KEPT = 32
_COPIES_KEPT = 8
_COPIES_TO_PLAN = 2  # after the first, which is slower
_MARGIN = 1.25  # time between copies, over that of the threads
_FITTING = (0.75, 1.25)  # interval that the costs ask for, over that of a plan which stays
_LONGEST_STEPS = 1_000_000


class CopyCost(msgspec.Struct, frozen=True):
    """The cost of copies on one rank."""

    step: int  # at which the rank is
    step_seconds: float
    blocking_seconds: tuple[float, ...]  # that each of the last copies took from the training
    background_seconds: float  # until the copy is complete and hashed
    transfer_seconds: float | None  # until it is on the other node; None: there was none
    sending_seconds: float = 0.0  # that sending and receiving one take from the training


class CopyPlan(msgspec.Struct, frozen=True):
    """When copies are made; `send_every` is a multiple of `every`."""

    first_step: int
    every: int
    send_every: int


# Counters in the store, of what is written there: costs, and all else.
_POSTS = "posts"
_CHANGES = "changes"
_COSTS = msgspec.json.Decoder(CopyCost)
_PLANS = msgspec.json.Decoder(CopyPlan)


def plan_of(
    costs: Sequence[CopyCost],
    overhead_ratio: float,
    lead_seconds: float,
    last: CopyPlan | None = None,
) -> CopyPlan:
    """Return the plan for the costs of all ranks.

    Each copy is sent if the budget allows it. If not, sending gets at most as much of the budget as
    the copies themselves.

    Args:
        costs: one per rank.
        overhead_ratio: share of a step that copies may take.
        lead_seconds: time until all ranks have read the plan.
        last: the plan in effect, whose interval stays while it about fits the costs, which vary.

    Example:
        >>> plan_of([CopyCost(9, 1.0, (0.012,), 0.1, None)], 0.005, lead_seconds=3)
        CopyPlan(first_step=14, every=3, send_every=3)
    """
    step = max(min(cost.step_seconds for cost in costs), 1e-6)
    # All ranks wait for the slowest one, which is another one each time.
    count = max(len(cost.blocking_seconds) for cost in costs)
    newest_first = (islice(cycle(cost.blocking_seconds[::-1]), count) for cost in costs)
    blocking = median(max(copy) for copy in zip(*newest_first, strict=True))
    background = max(cost.background_seconds for cost in costs)
    transfer = max((cost.transfer_seconds or 0.0 for cost in costs), default=0.0)
    sending = max(cost.sending_seconds for cost in costs)
    budget = overhead_ratio * step
    rarest = max(1.0, sending / blocking) if blocking else inf  # copies per transfer
    every = _interval(
        max((blocking + sending / rarest) / budget, _MARGIN * background / step),
        None if last is None else last.every,
    )
    left = budget * every - blocking
    copies_per_transfer = _interval(
        max(1.0, min(rarest, sending / left if left > 0.0 else inf)),
        None if last is None else last.send_every // last.every,
    )
    copies_per_transfer = max(copies_per_transfer, ceil(_MARGIN * transfer / (every * step)))
    return CopyPlan(
        first_step=max(cost.step for cost in costs) + 2 + ceil(lead_seconds / step),
        every=every,
        send_every=every * copies_per_transfer,
    )


def _interval(asked: float, last: int | None) -> int:
    """Return a whole number of at least `asked`; the last one while it about fits."""
    if last is not None and _FITTING[0] * last <= asked <= _FITTING[1] * last:
        return last
    return max(1, ceil(min(asked, _LONGEST_STEPS)))


class CopySchedule:
    """The steps of copies of one rank. The training thread asks; a thread of Paceline polls."""

    def __init__(
        self, store: RankStore | None, rank: int, world_size: int, overhead_ratio: float
    ) -> None:
        """`store`: with a connection of its own; None for one rank."""
        self.plan: CopyPlan | None = None
        self.off: str | None = None  # why all ranks stop making copies
        self.has_complete_step = store is None  # all ranks have completed a copy of it
        self._store = store
        self._rank = rank
        self._size = world_size
        slower = max(1.0, world_size / _RANKS_OF_FIRST_POLL)
        self._first_poll = min(POLL_SECONDS, slower * FIRST_POLL_SECONDS)
        self._revision_poll = min(POLL_SECONDS, slower * REVISION_POLL_SECONDS)
        self._overhead_ratio = overhead_ratio
        self._first_step: int | None = None
        self._step = 0
        self._step_ended: float | None = None
        self._steps: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._blocking: deque[float] = deque(maxlen=_COPIES_KEPT)
        self._deferred: deque[float] = deque(maxlen=_COPIES_KEPT)
        self._background: deque[float] = deque(maxlen=_COPIES_KEPT)
        self._transfers: deque[float] = deque(maxlen=_COPIES_KEPT)
        self._sending: deque[float] = deque(maxlen=_COPIES_KEPT)
        self._taking: deque[float] = deque(maxlen=_COPIES_KEPT)
        self._copies = 0
        self._awaits_transfer = False
        self._poll_at = 0.0
        self._post_at = 0.0
        self._planned_at: float | None = None  # clock, of the first plan
        self._published: CopyPlan | None = None
        self._posts = self._changes = 0  # values of the counters when this rank has read the store

    # The training thread

    def step_ended(self, step: int) -> bool:
        """Note the end of a step. Return whether to copy now."""
        now = monotonic()
        if self._step_ended is not None:
            self._steps.append(now - self._step_ended)
        self._step_ended = now
        self._step = step
        if self._first_step is None:
            self._first_step = step - 1
        published = self._published
        if published is not None and step >= published.first_step:
            self.plan = published
        if self.plan is None:
            return _is_first(step - self._first_step)
        return step % self.plan.every == 0

    def is_to_send(self, step: int) -> bool:
        """Return whether the copy of this step goes to the other node."""
        return self.plan is None or step % self.plan.send_every == 0

    def copied(self, seconds: float) -> None:
        """Note how long a copy blocked the training thread."""
        self._step_ended = monotonic()
        self._copies += 1
        if self._copies > 1:  # the first one fills caches
            self._blocking.append(seconds)

    def waited(self, seconds: float) -> None:
        """Note how long the last copy blocked an optimizer."""
        if seconds and self._blocking:
            self._blocking[-1] += seconds

    # Other threads

    def deferred(self, seconds: float) -> None:
        """Note what the work of the thread on a copy cost the training."""
        self._deferred.append(seconds)

    def hashed(self, seconds: float) -> None:
        """Note how long it took until a copy was complete."""
        self._background.append(seconds)

    def completed(self, step: int) -> None:
        """Note a complete copy; counted in the store until there is one step of all ranks."""
        store = self._store
        if store is None or self.has_complete_step:
            return
        if store.add(f"copies/{step}", 1) == self._size:
            self._write(store, "complete", str(step))

    def expect_transfers(self) -> None:
        """Have the first plan wait for a transfer, or for its failure."""
        self._awaits_transfer = True

    def sent(self, seconds: float | None) -> None:
        """Note how long a transfer took; None: it failed."""
        self._awaits_transfer = False
        if seconds is not None:
            self._transfers.append(seconds)

    def sending_cost(self, seconds: float) -> None:
        """Note what sending a copy took from the training."""
        self._sending.append(seconds)

    def taking_cost(self, seconds: float) -> None:
        """Note what taking a copy of another node took from the training."""
        self._taking.append(seconds)

    def poll(self) -> None:
        """Exchange costs and plan, if it is time. Errors of the store are raised."""
        now = monotonic()
        if now < self._poll_at:
            return
        planned = self._planned_at
        is_first = planned is None or now < planned + FIRST_SECONDS
        if planned is None:
            seconds = self._first_poll
        elif is_first or (self._rank != 0 and now < planned + 2 * FIRST_SECONDS):
            # The others poll often for longer, so that they still read the plans of rank 0 in time.
            seconds = self._revision_poll
        else:
            seconds = POLL_SECONDS
        self._poll_at = now + seconds
        cost = self._cost()
        due = cost if now >= self._post_at else None
        if due is not None:
            self._post_at = now + (FIRST_POST_SECONDS if is_first else POST_SECONDS)
        store = self._store
        if store is None:
            if due is not None:
                self._adopt(plan_of([due], self._overhead_ratio, 0.0, self._published))
            return
        if due is not None:
            store.set(f"cost/{self._rank}", msgspec.json.encode(due).decode())
            store.add(_POSTS, 1)
        if self._rank == 0 and cost is not None:
            posts = store.add(_POSTS, 0)
            if posts != self._posts:
                self._posts = posts
                self._publish(store, 3 * seconds)
        changes = store.add(_CHANGES, 0)
        if changes != self._changes:
            self._changes = changes
            self._read(store)

    def turn_off(self, reason: str) -> None:
        """Have all ranks stop making copies."""
        if self._store is not None:
            self._store.compare_set("off", "", reason)
            self._store.add(_CHANGES, 1)
        self.off = reason

    @staticmethod
    def _write(store: RankStore, key: str, value: str) -> None:
        store.set(key, value)
        store.add(_CHANGES, 1)

    def _cost(self) -> CopyCost | None:
        if len(self._blocking) < _COPIES_TO_PLAN or not self._background or self._awaits_transfer:
            return None
        # The first copies of a process take longer: memory is mapped, connections are made.
        is_first = self._planned_at is None
        typical = min if is_first else median
        blocking = [min(self._blocking.copy())] if is_first else list(self._blocking.copy())
        deferred = typical(self._deferred.copy()) if self._deferred else 0.0
        return CopyCost(
            step=self._step,
            step_seconds=median(self._steps.copy()),
            blocking_seconds=tuple(each + deferred for each in blocking),
            background_seconds=typical(self._background.copy()),
            transfer_seconds=typical(self._transfers.copy()) if self._transfers else None,
            sending_seconds=sum(typical(d.copy()) for d in (self._sending, self._taking) if d),
        )

    def _publish(self, store: RankStore, lead_seconds: float) -> None:
        keys = [f"cost/{rank}" for rank in range(self._size)]
        if not store.check(keys):
            return
        costs = [_COSTS.decode(each) for each in store.multi_get(keys)]
        costs = [msgspec.structs.replace(c, step=max(c.step, self._step)) for c in costs]
        last = self._published
        plan = plan_of(costs, self._overhead_ratio, lead_seconds, last)
        if last is None or (plan.every, plan.send_every) != (last.every, last.send_every):
            self._write(store, "plan", msgspec.json.encode(plan).decode())

    def _read(self, store: RankStore) -> None:
        self.has_complete_step = self.has_complete_step or store.check(["complete"])
        if store.check(["off"]):
            self.off = store.get("off").decode()
        elif store.check(["plan"]):
            self._adopt(_PLANS.decode(store.get("plan")))

    def _adopt(self, plan: CopyPlan) -> None:
        if plan != self._published:
            self._published = plan
            self._planned_at = self._planned_at or monotonic()


def _is_first(steps: int) -> bool:
    """Return whether a copy is made so many steps after the start, as long as there is no plan.

    It is at each of 2 to 8, every second up to 16, every fourth up to 32, and so on.
    """
    return steps > 1 and steps % (1 << max(0, steps.bit_length() - 3)) == 0
