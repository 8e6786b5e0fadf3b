"""One sweep of all collectors, printed: without a server, without leaving anything behind."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from paceline_agent.collect import frozen_tree as frozen
from paceline_agent.collect.collectors import discover
from paceline_agent.collect.contract import Collected, Collector, CollectorUnavailable, Context
from paceline_agent.collect.pool import CollectorLane, lane_of
from paceline_agent.collect.runner import BUSY, Patience, bounded, health, health_series
from paceline_agent.collect.scheduling import is_stuck, watched_seconds
from paceline_agent.expose import catalog, standard_output
from paceline_agent.expose.exposition import render
from paceline_agent.expose.scrape import completed
from paceline_agent.printable import printable
from paceline_agent.rings.reader import ranks_in
from paceline_agent.settings import AgentSettings
from paceline_wire.batch import CollectorEvent, DeviceEvent, Sample
from paceline_wire.node_directory import RINGS


@dataclass(frozen=True, slots=True)
class CollectorResult:
    """The result of one collector's call: samples, or a sentence with the reason."""

    collector: str
    collected: Collected | None
    trouble: str | None
    samples: list[Sample]  # including the health metrics of the call

    @property
    def series(self) -> int:
        return 0 if self.collected is None else len(self.collected.everything())


def run(settings: AgentSettings, *, as_json: bool, as_openmetrics: bool) -> int:
    """Print one sweep; return 0 if a collector returned samples. Raises OutputError."""
    settings = replace(settings, procfs_root=frozen.procfs_of(settings.procfs_root))
    with frozen.sysfs_of(settings.sysfs_root) as sysfs_root:
        outcomes = asyncio.run(sweep(discover(), context_of(settings, sysfs_root)))
    for outcome in outcomes:
        if outcome.trouble is not None:
            problem = outcome.trouble
            if settings.sysfs_root not in sysfs_root.parents:  # otherwise it is a temporary one
                problem = problem.replace(str(sysfs_root), str(settings.sysfs_root))
            print(printable(f"{outcome.collector}: {problem}"), file=sys.stderr)
        for event in outcome.collected.events if outcome.collected is not None else ():
            what = f"{event.kind} {event.device}" if isinstance(event, DeviceEvent) else event.kind
            print(printable(f"{outcome.collector}: {what}: {event.detail}"), file=sys.stderr)
    brought = (sample for outcome in outcomes for sample in outcome.samples)
    samples = list(completed(brought, settings.procfs_root))
    if as_json:
        report = _report(settings, outcomes, samples)
        standard_output.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        label = settings.hostname_label
        standard_output.write(render(samples, hostname_label=label, as_openmetrics=as_openmetrics))
    return 0 if any(outcome.series for outcome in outcomes) else 1


def context_of(settings: AgentSettings, sysfs_root: Path) -> Context:
    """Return the context of collectors; ranks are those with a ring on the node."""
    ranks = ranks_in(settings.directory / RINGS, settings.procfs_root)
    return Context(
        local_ranks=lambda: ranks,
        node_directory=settings.directory,
        sysfs_root=sysfs_root,
        procfs_root=settings.procfs_root,
        kmsg_path=settings.kmsg_path,
        excluded_rdma=frozenset(settings.excluded_rdma),
        replays_kmsg=True,
        nccl_inspector_directory=settings.nccl_inspector_directory,
        hostname=settings.agent_id,
    )


async def sweep(collectors: Sequence[type[Collector]], context: Context) -> list[CollectorResult]:
    """Run every collector once; isolated ones first, because others need their GPUs."""
    outcomes: list[CollectorResult] = []
    for isolated in (True, False):
        called = [collector for collector in collectors if collector.isolated == isolated]
        found = await asyncio.gather(*(_call(collector, context) for collector in called))
        for outcome in found:
            if outcome.collected is not None and outcome.collected.gpus is not None:
                context.inventory.gpus = tuple(outcome.collected.gpus)
        outcomes += found
    return sorted(outcomes, key=lambda outcome: outcome.collector)


async def _call(collector: type[Collector], context: Context) -> CollectorResult:
    """Call a collector until its backlog is read; each call has its own deadline."""
    lane = lane_of(collector, context)
    patience = collector.deadline_seconds
    if collector.isolated:
        patience += Patience().start_seconds
    events: list[DeviceEvent | CollectorEvent] = []
    started = time.monotonic()
    collected: Collected | None = None
    trouble: str | None = None
    try:
        while collected is None or collected.more:
            following = await _result(lane, patience)
            events += following.events
            lasting = following.lasting or (collected and collected.lasting)
            collected = msgspec.structs.replace(following, events=events, lasting=lasting)
    except TimeoutError:
        trouble = f"no answer within {patience:g} s"
    except CollectorUnavailable as unavailable:
        trouble = str(unavailable)
    except Exception as error:  # as in the runner
        trouble = f"{type(error).__name__}: {error}"
    finally:
        await lane.close()
    return _outcome(collector, collected, trouble, time.monotonic() - started)


async def _result(lane: CollectorLane, patience_seconds: float) -> Collected:
    """Return the result of a call; one that runs or waits for a CPU may be late.

    Raises:
        TimeoutError: the call is late and stuck.
        CollectorUnavailable: it is late by `Patience.starved_seconds`, or the collector raised it.
    """
    watched, most = watched_seconds(patience_seconds), patience_seconds + Patience().starved_seconds
    call = asyncio.ensure_future(lane.collect(time.time_ns()))
    latest = time.monotonic() + most
    try:
        await asyncio.wait({call}, timeout=patience_seconds - watched)
        while not call.done():
            before, began = lane.runnable(), time.monotonic()
            await asyncio.wait({call}, timeout=watched)
            now = time.monotonic()
            if call.done():
                break
            if is_stuck(before, lane.runnable(), now - began, watched):
                raise TimeoutError
            if now > latest:
                raise CollectorUnavailable(f"no answer within {most:g} s: {BUSY}")
        return call.result()
    finally:
        call.cancel()


def _outcome(
    collector: type[Collector],
    collected: Collected | None,
    trouble: str | None,
    duration_seconds: float,
) -> CollectorResult:
    refused, brought = 0, None
    samples: list[Sample] = []
    if collected is not None:
        collected, refused = bounded(collector, collected)
        samples = collected.everything()
        brought = len(samples)
    series = health_series(collector.name)
    samples += health(series, duration_seconds, time.time_ns(), brought, refused).samples()
    return CollectorResult(collector.name, collected, trouble, samples)


def _report(
    settings: AgentSettings, outcomes: Sequence[CollectorResult], samples: Sequence[Sample]
) -> dict[str, Any]:
    return {
        "hostname": settings.agent_id,
        "collectors": [
            {
                "collector": outcome.collector,
                "success": outcome.collected is not None,
                "trouble": outcome.trouble,
            }
            for outcome in outcomes
        ],
        "values": list(_values(samples)),
        "events": [
            event for outcome in outcomes if outcome.collected for event in outcome.collected.events
        ],
    }


def _values(samples: Iterable[Sample]) -> Iterable[dict[str, Any]]:
    known = catalog.load()
    for sample in samples:
        row = known.describe(sample.name)
        yield {
            "name": sample.name,
            "labels": sample.labels,
            "value": sample.value,
            "unit": row.unit,
            "type": row.type,
        }
