"""One example per resource for the OpenAPI document: a throttled GPU, as in the demo."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline_server.policy import Policy
from paceline_wire import metric_names

_TOPOLOGY = {"dp": 2, "pp": 2, "tp": 2}
_SUMMARY = (
    "Rank 2 (node-1) has been 2.47x slower than its peers since step 14, because of thermal "
    "throttle. It costs 55% of step time; fixing it gives 2.21x."
)
_LEDGER = {
    "wall_seconds": 41.9,
    "compute_seconds": 10.2,
    "communication_seconds": 1.1,
    "bubble_seconds": 1.7,
    "straggler_seconds": 12.5,
    "imbalance_seconds": 1.0,
    "slow_link_seconds": 0.0,
    "peer_wait_seconds": 0.4,
    "bubble_excess_seconds": 0.7,
    "data_wait_seconds": 0.1,
    "optimizer_seconds": 0.0,
    "evaluation_seconds": 0.0,
    "checkpoint_seconds": 0.1,
    "lost_seconds": 0.0,
    "restart_seconds": 0.0,
    "startup_seconds": 12.7,
    "idle_seconds": 1.4,
    "goodput_ratio": 0.33,
    "ettr_ratio": 0.66,
    "useful_steps": 27,
    "lost_steps": 0,
    "samples": 864,
    "tokens": 3538944,
}
_EFFICIENCY = {
    "steps": 20,
    "samples_per_second": 24.4,
    "tokens_per_second": 100053.4,
    "counted_from": 'samples and tokens from the "input_ids" of each batch',
    "model_flops_per_second": 4.2e15,
    "peak_flops_per_second": 989.5e12,
    "mfu_ratio": 0.53,
    "mfu_unknown": None,
    "exposed_communication_ratio": 0.41,
    "overlapped_communication_ratio": 0.06,
    "memory": {
        "rank": 0,
        "parameters_bytes": 3500000000,
        "gradients_bytes": 3500000000,
        "optimizer_bytes": 14000000000,
        "activations_bytes": 33000000000,
        "allocated_bytes": 21500000000,
        "reserved_bytes": 58000000000,
        "peak_bytes": 54000000000,
        "fragmentation_ratio": 0.03,
        "after_forward_bytes": 53000000000,
        "after_backward_bytes": 21500000000,
        "after_optimizer_bytes": 21500000000,
    },
    "ranks": [
        {
            "rank": 0,
            "exposed_communication_ratio": 0.55,
            "overlapped_communication_ratio": 0.06,
            "peak_bytes": 54000000000,
        },
        {
            "rank": 2,
            "exposed_communication_ratio": 0.02,
            "overlapped_communication_ratio": 0.06,
            "peak_bytes": 53000000000,
        },
    ],
    "scaling": {
        "efficiency_ratio": 0.93,
        "ranks": 8,
        "base_ranks": 1,
        "base_job_id": "job-0f3a91d2",
        "compared": "tokens_per_second",
    },
}
_JOB = {
    "id": "job-ec83bfc8",
    "name": "gpt-7b",
    "state": "running",
    "generation": 1,
    "restarts": 0,
    "topology": _TOPOLOGY,
    "requested_topology": _TOPOLOGY,
    "mode": "approve",
    "can_checkpoint": True,
    "checkpoint_step": 20,
    "checkpoint_path": "/ckpt/step-*.pt",
    "checkpoint_interval_steps": 10,
    "checkpoint_advice": {
        "interval_steps": 1094,
        "interval_seconds": 1433.1,
        "overhead_ratio": 0.0126,
        "overhead_now_ratio": 0.407,
        "checkpoint_seconds": 9.0,
        "mttf_seconds": 115600.0,
        "mttf_low_seconds": 62400.0,
        "mttf_high_seconds": 252000.0,
        "failures": 3,
        "node_hours": 9153.0,
        "text": "Saving every 1,094 steps (23.9 min) instead of every 10 steps would cost 1.3% of "
        "the time instead of 40.7%: a checkpoint takes 9.0 s, and a failure is expected every "
        "32.1 h (90%: 17.3 h to 70.0 h; 3 failures in 9,153 node hours of this fleet).",
    },
    "resumes": None,
    "policy": msgspec.to_builtins(Policy(mode="approve")),
    "policy_version": 3,
    "watched": False,
    "created_at": "2026-11-20T20:15:31.000000Z",
    "started_at": "2026-11-20T20:15:44.000000Z",
    "finished_at": None,
    "step": 26,
    "step_seconds": 1.31,
    "loss": 2.965,
    "evaluation_loss": 2.992,
    "metadata": {"schedule": "1f1b", "microbatches": "8"},
    "unrecorded_communication": None,
    "condition": "training",
    "verdict": {
        "kind": "straggler",
        "text": _SUMMARY,
        "incident_id": "inc-d155b9d3",
        "as_of": "2026-11-20T20:16:13.200000Z",
        "lag_seconds": 0.2,
        "is_outdated": False,
    },
    "ledger": _LEDGER,
    "efficiency": _EFFICIENCY,
    "open_incidents": 1,
    "pending_actions": 1,
}
_RANK = {
    "rank": 2,
    "dp_rank": 1,
    "pp_rank": 0,
    "tp_rank": 0,
    "node": "node-1",
    "local_rank": 0,
    "gpu": 0,
    "pid": 4242,
    "state": "attached",
    "condition": "running",
    "status": "running",
    "step": 26,
    "operation": "all_reduce tp#118",
    "operation_seconds": 0.02,
    "process_state": "S",
    "exit_code": None,
    "signal": None,
}
_STEP = {
    "generation": 1,
    "step": 26,
    "started_at": "2026-11-20T20:16:12.000000Z",
    "duration_seconds": 1.35,
    "loss": 2.965,
    "gradient_norm": 0.71,
    "slowest_rank": 2,
    "slowest_slowdown": 2.5,
    "compute_seconds": 0.58,
    "communication_seconds": 0.55,
    "wait_seconds": 0.51,
    "bubble_seconds": 0.21,
    "data_wait_seconds": 0.0,
    "optimizer_seconds": 0.0,
    "checkpoint_seconds": 0.0,
    "overlapped_seconds": 0.08,
    "samples": 32,
    "tokens": 131072,
    "skipped": 0,
    "straggler_seconds": 0.72,
    "imbalance_seconds": 0.0,
    "slow_link_seconds": 0.0,
    "peer_wait_seconds": 0.02,
    "bubble_excess_seconds": 0.04,
    "goodput_ratio": 0.42,
    "bubbles": [{"stage": 0, "measured_ratio": 0.149, "theory_ratio": 0.111}],
}
_GRID = {
    "job_id": "job-ec83bfc8",
    "generation": 1,
    "topology": _TOPOLOGY,
    "first_step": 6,
    "last_step": 25,
    "cells": [
        {
            "rank": 2,
            "dp_rank": 1,
            "pp_rank": 0,
            "tp_rank": 0,
            "node": "node-1",
            "state": "attached",
            "condition": "running",
            "self_seconds": 1.2,
            "slowdown": 2.5,
        }
    ],
}
_WHAT_IF = {
    "job_id": "job-ec83bfc8",
    "generation": 1,
    "topology": _TOPOLOGY,
    "first_step": 19,
    "last_step": 26,
    "step_seconds": 1.33,
    "ideal_step_seconds": 0.74,
    "slowdown": 1.79,
    "slowdown_by_step": {"19": 1.78, "26": 1.8},
    "slowdown_by_optype": {"forward-compute": 1.25, "backward-compute": 1.49},
    "slowdown_by_dp_rank": {"0": 1.0, "1": 1.79},
    "slowdown_by_stage": {"0": 1.76, "1": 1.0},
    "slowdown_by_worker": {"0": 1.0, "2": 1.76, "4": 1.0, "6": 1.0},
    "m_s": 0.02,
    "m_w": 0.97,
    "launch_slowdown": 1.0,
    "slowest_workers": [2],
    "verdict": {
        "kind": "slow_worker",
        "target": "rank 2",
        "text": "Steps take 1.79x as long as with evenly distributed work; rank 2 (dp rank 1, "
        "stage 0) explains 97% of the slowdown (fixing it gives 2.21x): check the node.",
    },
    "fixes": [{"kind": "rank", "target": "rank 2", "speedup": 2.21}],
    "advice": [
        {
            "change": "a zero-bubble schedule (ZB-H1)",
            "schedule": "zero_bubble",
            "microbatches": 8,
            "virtual_stages": 1,
            "speedup": 1.05,
            "bubble_ratio": 0.08,
            "bubble_ratio_now": 0.13,
            "memory_ratio": 1.0,
        }
    ],
}
_NODE = {
    "id": "node-1",
    "hostname": "gpu-0117",
    "version": "0.1.0",
    "state": "ready",
    "reason": None,
    "slots": 2,
    "job_id": "job-ec83bfc8",
    "ranks": [2, 3],
    "ranks_by_job": {"job-ec83bfc8": [2, 3]},
    "gpus": [
        {
            "index": 0,
            "uuid": "GPU-5ec0ffee-0000-4000-8000-000000000000",
            "name": "NVIDIA H200",
            "pci_bus_id": "00000000:1B:00.0",
            "sm_clock_hertz": 795e6,
            "temperature_celsius": 92.0,
            "power_watts": 512.0,
            "utilization_ratio": 0.97,
            "throttle_reasons": ["hw_thermal_slowdown", "sw_thermal_slowdown"],
        }
    ],
    "last_seen_at": "2026-11-20T20:16:13.400000Z",
}
_INCIDENT = {
    "id": "inc-d155b9d3",
    "job_id": "job-ec83bfc8",
    "generation": 1,
    "kind": "straggler",
    "cause": "thermal throttle",
    "state": "open",
    "severity": "critical",
    "urgency": 4.6,
    "summary": _SUMMARY,
    "rank": 2,
    "node": "node-1",
    "stage": 0,
    "slowdown": 2.47,
    "cost_ratio": 0.55,
    "speedup": 2.21,
    "persistence": "persistent",
    "onset_step": 14,
    "detected_step": 18,
    "opened_at": "2026-11-20T20:16:02.000000Z",
    "onset_at": "2026-11-20T20:15:57.100000Z",
    "detected_at": "2026-11-20T20:16:02.000000Z",
    "resolved_at": None,
    "recovery": None,
    "evidence": [
        {
            "text": "compute time 1202 ms per step since step 14; 486 ms at the speed of its peers",
            "metric": "self_seconds",
            "value": 1.202,
            "expected": 0.486,
        }
    ],
    "counter_evidence": [{"text": "gpu0 of node-1: 0 new PCIe replays"}],
    "causes": [
        {
            "name": "thermal throttle",
            "likelihood": 0.97,
            "evidence": [
                {
                    "text": "SM clock of gpu0 on node-1 fell from 1980 to 795 MHz",
                    "metric": metric_names.SM_CLOCK,
                    "value": 795.0,
                    "expected": 1980.0,
                }
            ],
        }
    ],
    "symptoms": [],
    "action_ids": ["act-b6596142"],
}
_STACKS = {
    "job_id": "job-ec83bfc8",
    "rank": 2,
    "state": "taken",
    "asked_at": "2026-11-20T20:16:02.000000Z",
    "received_at": "2026-11-20T20:16:02.300000Z",
    "error": None,
    "stacks": {
        "rank": 2,
        "taken_at": "2026-11-20T20:16:02.200000Z",
        "threads": [
            {
                "name": "MainThread",
                "holds_gil": False,
                "is_running": False,
                "frames": [{"function": "__next__", "file": "train/data.py", "line": 88}],
            }
        ],
        "error": None,
    },
}
_FLIGHT_RECORDER = {
    "job_id": "job-ec83bfc8",
    "generation": 1,
    "text": "No Flight Recorder dump: its environment offers none.",
    "dumps": [
        {
            "rank": 2,
            "received_at": "2026-11-20T20:16:02.300000Z",
            "error": "its environment offers none",
        }
    ],
    "report": None,
}
_ACTION = {
    "id": "act-b6596142",
    "job_id": "job-ec83bfc8",
    "incident_id": "inc-d155b9d3",
    "kind": "restart",
    "state": "proposed",
    "reason": f"Checkpoint and restart without node-1: {_SUMMARY}",
    "generation": 1,
    "exclude_nodes": ["node-1"],
    "created_at": "2026-11-20T20:16:02.000000Z",
    "finished_at": None,
    "phases": [],
    "can_be_rejected": True,
    "price_steps": 0,
    "price_seconds": 0.0,
    "worth": {
        "gain_seconds": 614.9,
        "cost_seconds": 52.9,
        "is_positive": True,
        "slow_ratio": 0.5,
        "slow_seconds": 1229.8,
        "lasted_seconds": 599.0,
        "remaining_seconds": 3600.0,
        "is_remaining_known": True,
        "kept_ratio": 1.0,
        "wait_seconds": 0.0,
        "pause_seconds": 30.0,
        "is_pause_measured": True,
        "repeated_steps": 0,
        "repeated_seconds": 0.0,
        "failure_probability": 0.0476,
    },
    "lost_steps": None,
    "resumed_step": None,
    "decided_by": None,
    "policy_version": 3,
    "error": None,
}
_AUDIT = {
    "id": 7,
    "at": "2026-11-20T20:16:21.000000Z",
    "job_id": "job-ec83bfc8",
    "actor": "alice",
    "verb": "approved",
    "subject": "act-b6596142",
    "detail": "node-1 is due for service anyway",
}


_POLICY_VERSION = {
    "version": 3,
    "hash": "9f2c6a0d5b1e4c7f8a3d2e1b0c9f8e7d6c5b4a39281706f5e4d3c2b1a0918273",
    "job_id": "job-ec83bfc8",
    "at": "2026-11-20T20:15:31.000000Z",
    "actor": "alice",
    "comment": "the storage is being moved",
    "values": msgspec.to_builtins(Policy(mode="approve")),
    "changes": [{"field": "mode", "before": "default", "after": "approve"}],
}
_RECOVERIES = {
    "since": "2026-10-23T20:16:21.000000Z",
    "is_complete": True,
    "groups": [
        {
            "kind": "failure",
            "launcher": "paceline",
            "week": None,
            "count": 12,
            "parts": {
                "detect": {
                    "count": 12,
                    "p50_seconds": 0.9,
                    "p90_seconds": 1.3,
                    "p99_seconds": 1.4,
                },
                "total": {
                    "count": 12,
                    "p50_seconds": 4.8,
                    "p90_seconds": 9.7,
                    "p99_seconds": 31.0,
                },
            },
        }
    ],
}


def _page(item: dict[str, Any]) -> dict[str, Any]:
    return {"items": [item], "next_cursor": None}


EXAMPLES: dict[str, dict[str, Any]] = {
    "CallerModel": {"name": "local-operator", "can_change": True},
    "LoginLink": {
        "path": "/login?code=b8pO6tJmXxCNVaG3Xzqj0Yh6t1mKcR0w5d2uL9sQeFA",
        "expires_at": "2026-11-20T20:25:31.000000Z",
    },
    "JobCreate": {
        "name": "gpt-7b",
        "argv": ["python", "-m", "paceline_trainer", "--schedule", "1f1b"],
        "topology": _TOPOLOGY,
        "mode": "approve",
        "policy": {"hang_patience_seconds": 60.0},
        "checkpoint_directory": "/checkpoints/gpt-7b",
    },
    "Job": _JOB,
    "JobPage": _page(_JOB),
    "Rank": _RANK,
    "RankPage": _page(_RANK),
    "Step": _STEP,
    "StepPage": _page(_STEP),
    "Grid": _GRID,
    "WhatIf": _WHAT_IF,
    "RankStacks": _STACKS,
    "FlightRecorder": _FLIGHT_RECORDER,
    "Node": _NODE,
    "NodePage": _page(_NODE),
    "Incident": _INCIDENT,
    "IncidentPage": _page(_INCIDENT),
    "Action": _ACTION,
    "ActionPage": _page(_ACTION),
    "RecoveryReport": _RECOVERIES,
    "PolicyVersion": _POLICY_VERSION,
    "PolicyPage": _page(_POLICY_VERSION),
    "PolicyUpdate": {
        "values": {"mode": "approve", "hang_patience_seconds": 60.0},
        "comment": "the storage is being moved",
    },
    "AuditRecord": _AUDIT,
    "AuditPage": _page(_AUDIT),
    "ActionDecision": {"comment": "node-1 is due for service anyway"},
    "RestartRequest": {"exclude_nodes": ["node-3"], "comment": "its NIC flaps"},
    "BurstRequest": {"collectors": ["nvml", "rdma"], "seconds": 20.0},
    "IngestAnswer": {"status": "stored", "sequence": 41},
    "Problem": {
        "type": "about:blank",
        "title": "Not Found",
        "status": 404,
        "detail": "There is no job job-0.",
        "instance": "/api/v1/jobs/job-0",
    },
}
