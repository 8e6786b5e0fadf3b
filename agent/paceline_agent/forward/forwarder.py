"""Packs news into batches and sends them until the server says it has each.

They go oldest first. After an outage the news of the node itself, which need no order, would wait
behind hours of old ones: they go into batches of a new boot, which overtake the backlog. What
belongs to a rank's ring stays in the old boot and in order, for a step means nothing without those
before it. Once the backlog is sent the new boot takes over everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import msgspec

from paceline_agent.clock import timeline_ns, until_next
from paceline_agent.errors import LinkError
from paceline_agent.forward.outbox import News, Outbox, is_of_rank
from paceline_agent.forward.server_link import Answer, ServerLink
from paceline_agent.forward.spool import Entry, Spool
from paceline_wire.batch import CONTENT_TYPE, Batch

log = logging.getLogger(__name__)

PHASE_SECONDS = 0.2  # after the ticks at which collectors and rings are read
BACKOFF_FIRST_SECONDS = 0.1
BACKOFF_MAXIMUM_SECONDS = 5.0
BACKLOG = 8  # batches that wait when the server answers; fewer are sent in a moment
TROUBLES_TOLD = 8  # different ones in a row
OUTDATED = 64  # of those that overtake: they have become a backlog themselves
LONGEST_PAUSE_SECONDS = 30.0  # however long the server says it should be
LONGEST_ASKED_SECONDS = 3.0  # a node that is silent for longer might be taken for lost
# Not the batch's fault: the token may be replaced, the server upgraded, the proxy mended.
_TRY_AGAIN = frozenset({401, 403, 404, 408, 425, 429})


class _Again(Exception):  # noqa: N818 - not an error: an answer that asks for patience
    def __init__(self, reason: str, after_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.after_seconds = after_seconds


class _Answer(msgspec.Struct):
    status: str
    sequence: int


_answers = msgspec.json.Decoder(_Answer)


@dataclass(slots=True)
class ForwardCounts:
    batches_sent: int = 0
    duplicates: int = 0
    retries: int = 0


@dataclass(slots=True)
class _Boot:
    boot_id: str
    sequence: int = 0  # of the next batch


def _nobody_asks(boot_id: str, sequence: int) -> None:
    pass


def _nobody_greets() -> None:
    pass


class Packer:
    """Cuts batches from the outbox into the spool: at an interval, and at once for the urgent.

    `packed` is called with the boot and the number of the last batch with news of ranks, once all
    news are in the spool and before any of it can be sent; `greet` when a boot begins to overtake,
    which must begin by saying who we are.
    """

    def __init__(
        self,
        agent_id: str,
        outbox: Outbox,
        spool: Spool,
        *,
        flush_seconds: float,
        heartbeat_seconds: float,
        packed: Callable[[str, int], None] = _nobody_asks,
        greet: Callable[[], None] = _nobody_greets,
    ) -> None:
        self._packed = packed
        self._greet = greet
        self._agent_id = agent_id
        self._boot = _Boot(spool.begin_boot())
        self._overtaking: _Boot | None = None
        self._outbox = outbox
        self._spool = spool
        self._flush_seconds = flush_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._asked_seconds = 0.0
        self._place = random.random()
        self._packed_at = time.monotonic()
        self._flushed_at = self._packed_at
        self._has_ranks = False  # the last flush had news of any
        self._in_step = False  # the last flush came right after the collectors

    async def run(self) -> None:
        while True:
            pause_seconds, self._in_step = self._pause_seconds(), False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_seconds):
                    await self._outbox.urgent.wait()
            self.flush()

    def _pause_seconds(self) -> float:
        """Asked by the server of many, each node goes at a moment of its own.

        Half as often while no rank has anything to tell: collectors bring theirs each second.
        """
        if not self._is_asked_to_wait:
            period_seconds = self._period_seconds
            in_step_seconds = period_seconds if self._in_step else 0.0
            return until_next(period_seconds, PHASE_SECONDS) + in_step_seconds
        return until_next(self._asked_seconds, self._place * self._asked_seconds)

    @property
    def _is_asked_to_wait(self) -> bool:
        return self._asked_seconds > self._flush_seconds

    @property
    def _period_seconds(self) -> float:
        return self._flush_seconds * (1 if self._has_ranks else 2)

    def all_came(self) -> None:
        """Whatever is collected at this tick is here: packed now, it needs no awakening later."""
        since_seconds = time.monotonic() - self._flushed_at
        if not self._is_asked_to_wait and since_seconds >= self._period_seconds / 2:
            self._in_step = True
            self._outbox.urgent.set()

    def pace(self, seconds: float) -> None:
        """The server asks for no more than a batch each so many seconds, but for what is urgent."""
        if math.isfinite(seconds):
            self._asked_seconds = min(max(seconds, 0.0), LONGEST_ASKED_SECONDS)

    def overtake(self) -> None:
        """The server answers and a backlog waits: from now on, the node's own news go first."""
        if self._overtaking is None or self._spool.overtaking >= OUTDATED:
            self._overtaking = _Boot(self._spool.begin_boot())
            self._spool.overtake(self._overtaking.boot_id)
            self._greet()

    def flush(self) -> None:
        """Pack all there is; if that is nothing for a second and nothing waits, a heartbeat."""
        self._flushed_at = time.monotonic()
        if self._overtaking is not None and not self._spool.backlog:
            self._boot, self._overtaking = self._overtaking, None
            self._spool.overtake(None)
        self._has_ranks = False
        for news in self._outbox.take():
            of_ranks = [event for event in news.events if is_of_rank(event)]
            self._has_ranks |= bool(news.spans or of_ranks)
            if self._overtaking is None:
                self._pack(self._boot, news)
                continue
            of_node = [event for event in news.events if not is_of_rank(event)]
            if of_node or news.samples or news.blocks:
                self._pack(self._overtaking, news._replace(events=of_node, spans=[]))
            if of_ranks or news.spans:
                self._pack(self._boot, News(of_ranks, news.spans, [], []))
        self._beat()
        self._packed(self._boot.boot_id, self._boot.sequence - 1)

    def _beat(self) -> None:
        quiet_seconds = time.monotonic() - self._packed_at
        waiting = len(self._spool) if self._overtaking is None else self._spool.overtaking
        if quiet_seconds >= self._heartbeat_seconds - self._flush_seconds / 2 and not waiting:
            self._pack(self._overtaking or self._boot, News([], [], [], []))

    def _pack(self, boot: _Boot, news: News) -> None:
        batch = Batch(
            agent_id=self._agent_id,
            boot_id=boot.boot_id,
            sequence=boot.sequence,
            packed_ns=timeline_ns(),
            events=news.events,
            spans=news.spans,
            samples=news.samples,
            blocks=news.blocks,
            dropped_batches=self._spool.counts.dropped,
            overtakes=boot is self._overtaking,
        )
        boot.sequence += 1
        if boot is (self._overtaking or self._boot):
            self._packed_at = time.monotonic()
        self._spool.append(batch)


class Forwarder:
    """Sends the spool's head until it is gone; `contact` is called when the server has answered.

    Contact means that the server has our news or says itself that it cannot store (503): only
    then can it not take us for lost meanwhile. `overtake` is called when it has one and more wait.
    """

    def __init__(
        self,
        link: ServerLink,
        spool: Spool,
        contact: Callable[[], None],
        overtake: Callable[[], None],
    ) -> None:
        self.counts = ForwardCounts()
        self._link = link
        self._spool = spool
        self._contact = contact
        self._overtake = overtake
        self._troubles: set[str] = set()  # that were told since the last success
        self._rejections: set[int] = set()

    async def run(self) -> None:
        while True:
            entry = await self._spool.head()
            for tries in count():
                try:
                    await self._send(entry)
                    break
                except _Again as again:
                    self._note(again)
                    await asyncio.sleep(_pause_seconds(again, tries))
            self._recovered()

    async def _send(self, entry: Entry) -> None:
        payload = self._spool.read(entry)
        if payload is None:
            return
        try:
            answer = await self._link.post("/api/v1/ingest", payload, CONTENT_TYPE)
        except LinkError as error:
            raise _Again(str(error)) from error
        if answer.status == 200:
            self._stored(entry, answer)
        elif _is_final(answer):
            self._reject(entry, answer)
        else:
            if answer.status == 503 and answer.is_problem:
                self._contact()
            raise _Again(answer.in_words(), _retry_after(answer))

    def _stored(self, entry: Entry, answer: Answer) -> None:
        try:
            duplicate = _answers.decode(answer.content).status == "duplicate"
        except msgspec.MsgspecError as error:
            raise _Again("the server's answer is not an ingest answer") from error
        self._contact()
        self.counts.batches_sent += 1
        self.counts.duplicates += duplicate
        self._spool.remove(entry)
        if self._spool.backlog >= BACKLOG:
            self._overtake()

    def _reject(self, entry: Entry, answer: Answer) -> None:
        self._spool.reject(entry)
        if answer.status not in self._rejections:
            self._rejections.add(answer.status)
            log.error("the server rejects batch %s: %s", entry.name, answer.in_words())

    def _note(self, again: _Again) -> None:
        self.counts.retries += 1
        if str(again) not in self._troubles and len(self._troubles) < TROUBLES_TOLD:
            self._troubles.add(str(again))
            log.warning("cannot send to the server, trying on: %s", again)

    def _recovered(self) -> None:
        if self._troubles:
            log.warning("sending to the server again, %d batches wait", len(self._spool))
        self._troubles.clear()


def _pause_seconds(again: _Again, tries: int) -> float:
    """Exponential with full jitter, and no sooner than the server asked."""
    longest_seconds = min(BACKOFF_FIRST_SECONDS * 2.0 ** min(tries, 30), BACKOFF_MAXIMUM_SECONDS)
    return max(again.after_seconds, random.uniform(0.0, longest_seconds))


def _is_final(answer: Answer) -> bool:
    """What a proxy says may change, but for what is too large for it."""
    if not 400 <= answer.status < 500 or answer.status in _TRY_AGAIN:
        return False
    return answer.is_problem or answer.status == 413


def _retry_after(answer: Answer) -> float:
    try:
        seconds = float(answer.headers["retry-after"])
    except (KeyError, ValueError):
        return 0.0
    return min(seconds, LONGEST_PAUSE_SECONDS) if math.isfinite(seconds) else 0.0
