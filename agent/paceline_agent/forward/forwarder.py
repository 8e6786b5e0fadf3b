"""The packer cuts batches from the outbox; the forwarder sends each until the server has stored it.

Batches are sent oldest first. After an outage, current data of the node itself, which needs no
order, would wait behind hours of backlog. It goes into batches of a new boot, which overtake the
backlog. Data of a rank's ring stays in the old boot and in order, because a step cannot be
interpreted without the steps before it. Once the backlog is sent, the new boot takes over
everything.
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
from paceline_agent.forward.outbox import BatchContents, Outbox, is_of_rank
from paceline_agent.forward.server_link import HttpAnswer, ServerLink
from paceline_agent.forward.spool import Spool, SpoolEntry
from paceline_wire.batch import CONTENT_TYPE, Batch

log = logging.getLogger(__name__)

PHASE_SECONDS = 0.2  # after the tick at which collectors and rings are read
BACKOFF_FIRST_SECONDS = 0.1
BACKOFF_MAXIMUM_SECONDS = 5.0
BACKLOG = 8  # batches waiting when the server responds; fewer are sent in a moment
DISTINCT_ERRORS_LOGGED = 8  # logged at most, until the next success
OUTDATED = 64  # number of overtaking batches from which they are a backlog themselves
LONGEST_PAUSE_SECONDS = 30.0  # limit of Retry-After
LONGEST_REQUESTED_SECONDS = 3.0  # the server may count a node as lost after 5 s of silence
# Not caused by the batch: the token may be replaced, the server upgraded, the proxy fixed.
_TEMPORARY = frozenset({401, 403, 404, 408, 425, 429})


class _RetryError(Exception):
    """A batch that could not be sent now. `after_seconds`: from `Retry-After`."""

    def __init__(self, reason: str, after_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.after_seconds = after_seconds


class _IngestAnswer(msgspec.Struct):
    status: str
    sequence: int


_ingest_answers = msgspec.json.Decoder(_IngestAnswer)


@dataclass(slots=True)
class ForwardCounts:
    """Counters of the forwarder since the agent started."""

    batches_sent: int = 0
    duplicates: int = 0
    retries: int = 0


@dataclass(slots=True)
class _Boot:
    """A numbered sequence of batches."""

    boot_id: str
    sequence: int = 0  # number of the next batch


def _ignore_packed(boot_id: str, sequence: int) -> None:
    pass


def _ignore_hello() -> None:
    pass


class Packer:
    """Cuts batches from the outbox into the spool: periodically, and immediately for urgent events.

    Args:
        packed: called with the boot and sequence of the last batch with data of ranks, once
            everything is in the spool and before any of it can be sent.
        send_hello: called when a boot begins to overtake: its first event must be the hello.
    """

    def __init__(
        self,
        agent_id: str,
        outbox: Outbox,
        spool: Spool,
        *,
        flush_seconds: float,
        heartbeat_seconds: float,
        packed: Callable[[str, int], None] = _ignore_packed,
        send_hello: Callable[[], None] = _ignore_hello,
    ) -> None:
        self._packed = packed
        self._send_hello = send_hello
        self._agent_id = agent_id
        self._boot = _Boot(spool.begin_boot())
        self._overtaking: _Boot | None = None
        self._outbox = outbox
        self._spool = spool
        self._flush_seconds = flush_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._requested_seconds = 0.0
        self._phase = random.random()  # this node's phase, as a share of the requested period
        self._packed_at = time.monotonic()
        self._flushed_at = self._packed_at
        self._has_ranks = False  # the last flush had data of ranks
        self._in_step = False  # the last flush came right after the collectors

    async def run(self) -> None:
        """Flush until cancelled."""
        while True:
            pause_seconds, self._in_step = self._pause_seconds(), False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_seconds):
                    await self._outbox.urgent.wait()
            self.flush()

    def _pause_seconds(self) -> float:
        """Return the seconds until the next flush.

        At a period that the server requested, each node flushes at its own phase. Without data of
        ranks the period doubles, because collectors run only once per second.
        """
        if not self._is_throttled:
            period_seconds = self._period_seconds
            in_step_seconds = period_seconds if self._in_step else 0.0
            return until_next(period_seconds, PHASE_SECONDS) + in_step_seconds
        return until_next(self._requested_seconds, self._phase * self._requested_seconds)

    @property
    def _is_throttled(self) -> bool:
        return self._requested_seconds > self._flush_seconds

    @property
    def _period_seconds(self) -> float:
        return self._flush_seconds * (1 if self._has_ranks else 2)

    def on_collected(self) -> None:
        """Flush now that all collectors of this tick are done, which saves a later wake-up."""
        since_seconds = time.monotonic() - self._flushed_at
        if not self._is_throttled and since_seconds >= self._period_seconds / 2:
            self._in_step = True
            self._outbox.urgent.set()

    def pace(self, seconds: float) -> None:
        """Set the period that the server requests; urgent events are still sent immediately."""
        if math.isfinite(seconds):
            self._requested_seconds = min(max(seconds, 0.0), LONGEST_REQUESTED_SECONDS)

    def overtake(self) -> None:
        """Let current data of the node overtake the backlog, because the server responds again."""
        if self._overtaking is None or self._spool.overtaking >= OUTDATED:
            self._overtaking = _Boot(self._spool.begin_boot())
            self._spool.overtake(self._overtaking.boot_id)
            self._send_hello()

    def flush(self) -> None:
        """Pack everything, or a heartbeat if nothing was packed for a second and nothing waits."""
        self._flushed_at = time.monotonic()
        if self._overtaking is not None and not self._spool.backlog:
            self._boot, self._overtaking = self._overtaking, None
            self._spool.overtake(None)
        self._has_ranks = False
        for contents in self._outbox.take():
            of_ranks = [event for event in contents.events if is_of_rank(event)]
            self._has_ranks |= bool(contents.spans or of_ranks)
            if self._overtaking is None:
                self._pack(self._boot, contents)
                continue
            of_node = [event for event in contents.events if not is_of_rank(event)]
            if of_node or contents.samples or contents.blocks:
                self._pack(self._overtaking, contents._replace(events=of_node, spans=[]))
            if of_ranks or contents.spans:
                self._pack(self._boot, BatchContents(of_ranks, contents.spans, [], []))
        self._pack_heartbeat()
        self._packed(self._boot.boot_id, self._boot.sequence - 1)

    def _pack_heartbeat(self) -> None:
        quiet_seconds = time.monotonic() - self._packed_at
        waiting = len(self._spool) if self._overtaking is None else self._spool.overtaking
        if quiet_seconds >= self._heartbeat_seconds - self._flush_seconds / 2 and not waiting:
            self._pack(self._overtaking or self._boot, BatchContents([], [], [], []))

    def _pack(self, boot: _Boot, contents: BatchContents) -> None:
        batch = Batch(
            agent_id=self._agent_id,
            boot_id=boot.boot_id,
            sequence=boot.sequence,
            packed_ns=timeline_ns(),
            events=contents.events,
            spans=contents.spans,
            samples=contents.samples,
            blocks=contents.blocks,
            dropped_batches=self._spool.counts.dropped,
            overtakes=boot is self._overtaking,
        )
        boot.sequence += 1
        if boot is (self._overtaking or self._boot):
            self._packed_at = time.monotonic()
        self._spool.append(batch)


class Forwarder:
    """Sends the spool's batches, each until the server has stored or rejected it.

    Args:
        contact: called when the server stored a batch or responded that it cannot (503).
            Only then does the server know that this node is alive.
        overtake: called when the server stored a batch and a backlog waits.
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
        self._logged_errors: set[str] = set()  # since the last success
        self._rejections: set[int] = set()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            entry = await self._spool.head()
            for tries in count():
                try:
                    await self._send(entry)
                    break
                except _RetryError as retry:
                    self._on_retry(retry)
                    await asyncio.sleep(_pause_seconds(retry, tries))
            self._on_sent()

    async def _send(self, entry: SpoolEntry) -> None:
        try:
            payload = self._spool.read(entry)
        except OSError as error:
            raise _RetryError(f"its spool cannot be read: {error.strerror}") from error
        if payload is None:
            return
        try:
            answer = await self._link.post("/api/v1/ingest", payload, CONTENT_TYPE)
        except LinkError as error:
            raise _RetryError(str(error)) from error
        if answer.status == 200:
            self._on_stored(entry, answer)
        elif _is_final(answer):
            self._reject(entry, answer)
        else:
            if answer.status == 503 and answer.is_problem:
                self._contact()
            raise _RetryError(answer.describe(), _retry_after(answer))

    def _on_stored(self, entry: SpoolEntry, answer: HttpAnswer) -> None:
        try:
            duplicate = _ingest_answers.decode(answer.content).status == "duplicate"
        except msgspec.MsgspecError as error:
            raise _RetryError("the server's answer is not an ingest answer") from error
        self._contact()
        self.counts.batches_sent += 1
        self.counts.duplicates += duplicate
        self._spool.remove(entry)
        if self._spool.backlog >= BACKLOG:
            self._overtake()

    def _reject(self, entry: SpoolEntry, answer: HttpAnswer) -> None:
        self._spool.reject(entry)
        if answer.status not in self._rejections:
            self._rejections.add(answer.status)
            log.error("the server rejects batch %s: %s", entry.name, answer.describe())

    def _on_retry(self, retry: _RetryError) -> None:
        self.counts.retries += 1
        if (
            str(retry) not in self._logged_errors
            and len(self._logged_errors) < DISTINCT_ERRORS_LOGGED
        ):
            self._logged_errors.add(str(retry))
            log.warning("cannot send to the server, retrying: %s", retry)

    def _on_sent(self) -> None:
        if self._logged_errors:
            log.warning("sending to the server again, %d batches wait", len(self._spool))
        self._logged_errors.clear()


def _pause_seconds(retry: _RetryError, tries: int) -> float:
    """Return an exponential back-off with full jitter, but no less than the server asked for."""
    longest_seconds = min(BACKOFF_FIRST_SECONDS * 2.0 ** min(tries, 30), BACKOFF_MAXIMUM_SECONDS)
    return max(retry.after_seconds, random.uniform(0.0, longest_seconds))


def _is_final(answer: HttpAnswer) -> bool:
    """Return whether a retry is useless: the server rejects the batch, or a proxy rejects its
    size."""
    if not 400 <= answer.status < 500 or answer.status in _TEMPORARY:
        return False
    return answer.is_problem or answer.status == 413


def _retry_after(answer: HttpAnswer) -> float:
    try:
        seconds = float(answer.headers["retry-after"])
    except (KeyError, ValueError):
        return 0.0
    return min(seconds, LONGEST_PAUSE_SECONDS) if math.isfinite(seconds) else 0.0
