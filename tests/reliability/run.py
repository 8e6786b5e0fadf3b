"""Inject the faults of the campaign, one after another:

    python -m tests.reliability.run [--only TEXT] [--times N] [--seed N] [--json FILE] [--write]

Sessions: `default` has a cluster on PostgreSQL, `clock` has nodes whose clocks can jump, `disk` has
a small disk, and `network` has a network namespace for each node.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from paceline_cli.client import Client
from paceline_demo.training import stop_jobs
from tests.reliability import faults, report
from tests.reliability.cluster import CampaignCluster, PostgreSQL
from tests.reliability.trial import FaultPlan, RunningJob, TrialResult, is_good, play

DISK_MEBIBYTES = 300


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="part of the names of the faults")
    parser.add_argument("--times", type=int, help="instead of the number of each fault")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="write docs/reliability.md")
    arguments = parser.parse_args()
    results = campaign(arguments.only, arguments.times, arguments.seed)
    if arguments.json is not None:
        written = [dataclasses.asdict(result) for result in results]
        arguments.json.write_text(json.dumps(written, indent=1))
    if arguments.write:
        report.write(results)
    sys.exit(not all(is_good(result) for result in results))


def campaign(only: str = "", times: int | None = None, seed: int = 1) -> list[TrialResult]:
    """Run the campaign and return its results; print each when it arrives."""
    chance = random.Random(seed)
    results = []
    postgresql = PostgreSQL()
    try:
        chosen = [plan for plan in faults.plans(postgresql) if only in plan.name]
        for session in ("default", "clock", "disk", "network"):
            members = [plan for plan in chosen if plan.session == session]
            possible = [plan for plan in members if faults.needs(plan) is None]
            for plan in members:
                if plan not in possible:
                    _show(f"{plan.name}: skipped, needs {faults.needs(plan)}")
            if possible:
                with _cluster(session, postgresql) as cluster:
                    results += _play_all(cluster, possible, times, chance)
    finally:
        postgresql.close()
    return results


def _play_all(
    cluster: CampaignCluster, plans: Sequence[FaultPlan], times: int | None, chance: random.Random
) -> list[TrialResult]:
    trials = [plan for plan in plans for _ in range(times or plan.times)]
    # In random order, with the faults that end the job last.
    chance.shuffle(trials)
    trials.sort(key=lambda plan: plan.outcome == "end")
    results = []
    with Client(cluster.url, cluster.operator_token) as client:
        running = RunningJob(cluster, client, chance)
        for number, plan in enumerate(trials, 1):
            try:
                result = play(plan, running)
            except click.ClickException as error:
                result = TrialResult(plan.name, "", str(error), 0.0, False, [], 0, 0, 0, 0)
                running.job_id = ""
                stop_jobs(cluster.url, cluster.operator_token)
            results.append(result)
            mark = "ok  " if is_good(result) else "FAIL"
            _show(f"{number:3}/{len(trials)} {mark} {dataclasses.asdict(result)}")
    stop_jobs(cluster.url, cluster.operator_token)
    return results


@contextlib.contextmanager
def _cluster(session: str, postgresql: PostgreSQL) -> Iterator[CampaignCluster]:
    """Start the cluster that the session needs."""
    cluster = CampaignCluster(
        postgresql.url if session in ("default", "network") else None,
        namespaces=session == "network",
        fake_clock=session == "clock",
    )
    unmount = None
    if session == "disk":
        unmount = faults.mount_small_disk(cluster.directory, DISK_MEBIBYTES)
    try:
        cluster.start()
        yield cluster
    finally:
        orphans = cluster.close()
        _show(f"{session}: {orphans} processes outlived the cluster")
        if unmount is not None:
            unmount()
        cluster.remove_logs()


def _show(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
