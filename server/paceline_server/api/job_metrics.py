"""Prometheus metrics of jobs, read from the database at each scrape.

The number of series is bounded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from paceline_server.api.recoveries import DAY_NS, ROWS, groups
from paceline_server.api.schemas import RecoveryGroup
from paceline_server.steps.types import Ledger, StepSummary
from paceline_server.store import queries, recoveries
from paceline_server.store.database import UNAVAILABLE, Database
from paceline_server.store.log import FINISHED, oldest_unread_ns
from paceline_server.store.models import IncidentRow, JobRow
from paceline_server.store.shares import medians, newest_shares

_JOBS = 200
_INCIDENTS = 200
_DETAILED_JOBS = 20  # jobs with per-rank and per-stage metrics
_RECOVERY_DAYS = 7
_RECOVERIES_SECONDS = 60.0
_RANKS = 64  # the slowest ranks of a job
_PARTS = tuple(
    name.removesuffix("_seconds")
    for name in Ledger.__struct_fields__
    if name.endswith("_seconds") and name != "wall_seconds"
)
_FIGURES = {  # fields of `Efficiency`
    "samples_per_second": "Samples per second over the recent steps.",
    "tokens_per_second": "Tokens per second over the recent steps.",
    "mfu_ratio": "Model FLOPs utilization over the recent steps.",
    "exposed_communication_ratio": "Share of step time blocked in communication.",
    "overlapped_communication_ratio": "Share of step time with communication behind other work.",
}
_STATES = ("pending", "starting", "running", "recovering", "finished", "failed", "stopped")


class JobCollector(Collector):
    """Collects job metrics. They are absent, not zero, while the database is unavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._recoveries: tuple[float, list[RecoveryGroup]] | None = None

    def describe(self) -> Iterable[Metric]:
        return []

    def _recovery_groups(self, session: Session) -> list[RecoveryGroup]:
        """Return the recoveries of the last days; at most a minute old, because they are many."""
        now = time.monotonic()
        if self._recoveries is None or now - self._recoveries[0] > _RECOVERIES_SECONDS:
            since_ns = time.time_ns() - _RECOVERY_DAYS * DAY_NS
            rows = recoveries.since(session, since_ns, ROWS)
            self._recoveries = now, list(groups(rows, by_week=False))
        return self._recoveries[1]

    def collect(self) -> Iterator[Metric]:
        try:
            with self._database.read() as session:
                states = dict(
                    session.execute(select(JobRow.state, func.count()).group_by(JobRow.state)).all()
                )
                jobs = session.scalars(
                    select(JobRow)
                    .where(JobRow.state.not_in(FINISHED))
                    .order_by(JobRow.created_ns.desc())
                    .limit(_JOBS)
                ).all()
                incidents = session.scalars(
                    select(IncidentRow.kind).where(IncidentRow.state != "resolved")
                ).all()
                open_incidents = session.scalars(
                    select(IncidentRow)
                    .where(IncidentRow.state != "resolved")
                    .order_by(IncidentRow.opened_ns.desc())
                    .limit(_INCIDENTS)
                ).all()
                unread_ns = oldest_unread_ns(session)
                repaired = self._recovery_groups(session)
                detailed = jobs[:_DETAILED_JOBS]
                newest = {
                    job.id: row.summary
                    for job in detailed
                    for row in queries.steps(session, job.id, None, 1)
                }
                slowdowns = {job.id: _slowdowns(session, job) for job in detailed}
        except UNAVAILABLE:
            return
        yield _lag(unread_ns)
        yield _jobs(states)
        yield _incidents(incidents)
        yield from _each(jobs)
        yield _ledgers(jobs)
        yield _verdicts(open_incidents)
        yield from _recoveries(repaired)
        yield _slowest_ranks(detailed, slowdowns)
        yield _bubbles(detailed, newest)


def _recoveries(groups: Iterable[RecoveryGroup]) -> Iterator[Metric]:
    labels = ["kind", "launcher"]
    count = GaugeMetricFamily(
        "paceline_recoveries", "Recoveries of the last seven days.", labels=labels
    )
    seconds = GaugeMetricFamily(
        "paceline_recovery_seconds",
        "Quantiles of the parts of the recoveries of the last seven days (docs/repair.md).",
        labels=[*labels, "part", "quantile"],
    )
    for group in groups:
        count.add_metric([group.kind, group.launcher], group.count)
        for part, found in group.parts.items():
            for share, value in (
                ("0.5", found.p50_seconds),
                ("0.9", found.p90_seconds),
                ("0.99", found.p99_seconds),
            ):
                seconds.add_metric([group.kind, group.launcher, part, share], value)
    yield from (count, seconds)


def _lag(unread_ns: int | None) -> Metric:
    seconds = 0.0 if unread_ns is None else max(0, time.time_ns() - unread_ns) / 1e9
    return GaugeMetricFamily(
        "paceline_worker_lag_seconds",
        "Age of the oldest batch that a worker has not processed.",
        value=seconds,
    )


def _jobs(states: dict[str, int]) -> Metric:
    family = GaugeMetricFamily("paceline_jobs", "Jobs by state.", labels=["state"])
    for state in _STATES:
        family.add_metric([state], states.get(state, 0))
    return family


def _incidents(kinds: Iterable[str]) -> Metric:
    family = GaugeMetricFamily(
        "paceline_incidents_open", "Unresolved incidents by kind.", labels=["kind"]
    )
    counts = Counter(kinds)
    for kind in sorted({"straggler", "bubble", "hang", "failure", *counts}):
        family.add_metric([kind], counts[kind])
    return family


def _each(jobs: Iterable[JobRow]) -> Iterator[Metric]:
    labels = ["job_id", "job"]
    goodput = GaugeMetricFamily(
        "paceline_job_goodput_ratio",
        "Time that the steps need on healthy peers over wall time.",
        labels=labels,
    )
    ettr = GaugeMetricFamily(
        "paceline_job_ettr_ratio",
        "Time of the steps that count, without checkpoints, over wall time.",
        labels=labels,
    )
    pace = GaugeMetricFamily(
        "paceline_job_step_duration_seconds", "Median duration of recent steps.", labels=labels
    )
    step = GaugeMetricFamily("paceline_job_step", "Newest finished step.", labels=labels)
    figures = {
        name: GaugeMetricFamily(f"paceline_job_{name}", text, labels=labels)
        for name, text in _FIGURES.items()
    }
    for job in jobs:
        job_labels = [job.id, job.name]
        if job.ledger.goodput_ratio is not None:
            goodput.add_metric(job_labels, job.ledger.goodput_ratio)
        if job.ledger.ettr_ratio is not None:
            ettr.add_metric(job_labels, job.ledger.ettr_ratio)
        for name, family in figures.items():
            value = getattr(job.ledger.efficiency, name)
            if value is not None:
                family.add_metric(job_labels, value)
        if job.step_seconds is not None:
            pace.add_metric(job_labels, job.step_seconds)
        if job.step is not None:
            step.add_metric(job_labels, job.step)
    yield from (goodput, ettr, pace, step, *figures.values())


def _ledgers(jobs: Iterable[JobRow]) -> Metric:
    family = GaugeMetricFamily(
        "paceline_job_ledger_seconds",
        "Wall time of the job by category.",
        labels=["job_id", "job", "part"],
    )
    for job in jobs:
        for part in _PARTS:
            family.add_metric([job.id, job.name, part], getattr(job.ledger, f"{part}_seconds"))
    return family


def _verdicts(incidents: Iterable[IncidentRow]) -> Metric:
    """Return an info metric: its value is always 1, its labels carry the information."""
    family = GaugeMetricFamily(
        "paceline_incident_info",
        "Unresolved incidents; the value is always 1.",
        labels=["incident_id", "job_id", "kind", "severity", "cause", "rank", "node"],
    )
    for row in incidents:
        finding = row.view.finding
        rank = "" if finding.rank is None else str(finding.rank)
        labels = [
            row.id,
            row.job_id,
            row.kind,
            row.severity,
            finding.cause,
            rank,
            finding.node or "",
        ]
        family.add_metric(labels, 1)
    return family


def _slowdowns(session: Session, job: JobRow) -> list[float | None]:
    """Return each rank's slowdown in the newest step."""
    shares = newest_shares(session, job.id, job.generation, job.topology.world_size, 1)
    return medians(shares.slowdown)


def _slowest_ranks(
    jobs: Sequence[JobRow], slowdowns: Mapping[str, Sequence[float | None]]
) -> Metric:
    family = GaugeMetricFamily(
        "paceline_job_rank_slowdown_ratio",
        "Self time of a rank in the newest step over that of its peers (64 slowest ranks).",
        labels=["job_id", "job", "rank"],
    )
    for job in jobs:
        measured = [
            (value, rank) for rank, value in enumerate(slowdowns[job.id]) if value is not None
        ]
        for value, rank in sorted(measured, reverse=True)[:_RANKS]:
            family.add_metric([job.id, job.name, str(rank)], value)
    return family


def _bubbles(jobs: Sequence[JobRow], newest: Mapping[str, StepSummary]) -> Metric:
    family = GaugeMetricFamily(
        "paceline_job_stage_bubble_ratio",
        "Idle share of a stage in the newest step: measured, and in theory for its schedule.",
        labels=["job_id", "job", "stage", "kind"],
    )
    for job in jobs:
        job_labels = [job.id, job.name]
        for stage in newest[job.id].bubbles if job.id in newest else ():
            family.add_metric([*job_labels, str(stage.stage), "measured"], stage.measured_ratio)
            if stage.theory_ratio is not None:
                family.add_metric([*job_labels, str(stage.stage), "theory"], stage.theory_ratio)
    return family
