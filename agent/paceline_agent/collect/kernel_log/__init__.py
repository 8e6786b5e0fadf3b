"""The kernel log: its lines, their meaning, and counts of events."""

from __future__ import annotations

from collections.abc import Iterable

from paceline_agent.collect.contract import Collected
from paceline_agent.collect.kernel_log.ledger import KernelEventCounts
from paceline_agent.collect.kernel_log.recognize import KernelEvent, Recognizer
from paceline_agent.collect.kernel_log.records import Record, records_of

_EVENTS_AT_MOST = 10_000  # events returned for a complete log


def parse(lines: Iterable[str], now_ns: int) -> Collected:
    """Return the events of a complete log of any age and format.

    An event has the time of its line, or `now_ns` if the line has no time of this clock. Repeats
    within a minute of the log's own time are one event with a count.
    """
    recognizer, ledger = Recognizer(), KernelEventCounts(events_at_most=_EVENTS_AT_MOST)
    seconds = 0.0
    for line in lines:
        for record in records_of(line):
            seconds = record.seconds or seconds
            event = recognizer.recognize(record.message, record.times)
            if event is not None:
                ledger.take(event, record.wall_ns or now_ns, seconds)
    events = ledger.events(float("inf"))
    return Collected(samples=list(ledger.samples(now_ns)), events=[*events])


__all__ = ["KernelEvent", "KernelEventCounts", "Recognizer", "Record", "parse", "records_of"]
