"""`paceline agent --check`: what the agent can measure on this node, and how to enable the rest.

Nothing is created, started or changed. Files that cannot be read are tried once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import msgspec

from paceline_agent.collect import frozen_tree as frozen
from paceline_agent.collect.collectors import discover
from paceline_agent.collect.contract import Context
from paceline_agent.expose import once, standard_output
from paceline_agent.expose.check import communication, devices, node, privileges
from paceline_agent.expose.check.report import CheckRow, as_json, as_table, status
from paceline_agent.expose.once import CollectorResult
from paceline_agent.settings import AgentSettings

_WITH_OWN_ROWS = {"nvml", "rdma", "kmsg", "timex"}


def run(settings: AgentSettings, *, json: bool) -> int:
    """Print the table; return 1 if something that the agent requires is missing.

    Raises OutputError.
    """
    with frozen.sysfs_of(settings.sysfs_root) as sysfs_root:
        context = once.context_of(settings, sysfs_root)
        outcomes = asyncio.run(once.sweep(discover(), context))
        rows = [
            msgspec.structs.replace(
                row, evidence=row.evidence.replace(str(sysfs_root), str(settings.sysfs_root))
            )
            for row in check(settings, context, outcomes)
        ]
    standard_output.write((as_json(rows) if json else as_table(rows)) + "\n")
    return status(rows)


def check(
    settings: AgentSettings, context: Context, outcomes: Sequence[CollectorResult]
) -> Iterator[CheckRow]:
    found = {outcome.collector: outcome for outcome in outcomes}
    yield from devices.gpus(found["nvml"])
    yield from devices.rdma(context)
    yield devices.kernel_log(found["kmsg"], settings.kmsg_path)
    yield from devices.others(outcomes, besides=_WITH_OWN_ROWS)
    yield privileges.pressure(settings.procfs_root)
    yield privileges.other_processes(settings.procfs_root)
    yield privileges.stacks(settings.procfs_root)
    yield node.rings(settings)
    yield node.rank_user(settings)
    yield node.found_by_ranks(settings)
    yield from communication.of_ranks(settings)
    yield node.spool(settings)
    yield node.server(settings)
    yield node.clock()
