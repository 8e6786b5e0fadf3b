"""The expected report for each fault of each trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ONSET = 60  # the last step before the fault
FAULTY_RANK = 2


@dataclass(frozen=True)
class Case:
    """A fault in a trainer. `line`: the function of the script that the verdict names."""

    trainer: str
    fault: str
    kind: str
    side: str | None = None
    line: str = ""

    def is_named(self, incident: dict[str, Any]) -> bool:
        """Return whether the incident names the rank, the side and the line."""
        return (
            incident["rank"] == FAULTY_RANK
            and incident["side"] == self.side
            and self.line in incident["summary"]
        )


# The function in which each fault blocks its rank, or another part of the verdict.
HUNG = {
    "lock": "lock)",
    "left": "main)",
    "stop": "(SIGSTOP",
    "endless": "endless)",
    "gil": "tokenizer holds the GIL",
    "read_socket": "read_socket)",
    "read_file": "read_file)",
    "caught": "retry_later)",
}
MISMATCHED = {"another_op": "another_op)", "skip_subgroup": "ranks 2-3"}
TRAINERS = ("ddp", "accumulation", "fsdp2", "fsdp2_tp", "gpipe", "1f1b")


def _cases() -> list[Case]:
    cases = []
    for trainer in TRAINERS:
        every = trainer == "ddp"
        cases.append(Case(trainer, "slow", "straggler"))
        if every:
            cases.append(Case(trainer, "slow_compute", "straggler"))
            cases.append(Case(trainer, "exit", "failure"))
        if every or trainer == "fsdp2":
            cases.append(Case(trainer, "slow_data", "slow_data"))
        for fault, line in HUNG.items():
            if every or fault in ("lock", "left", "stop") or (trainer, fault) in MORE:
                cases.append(Case(trainer, fault, "hang", "host", line))
        if trainer == "fsdp2":  # its collectives differ in size: gloo aborts the faulty rank
            cases.append(Case(trainer, "another_op", "failure"))
        for fault, line in MISMATCHED.items():
            if every or (trainer, fault) in MORE:
                cases.append(Case(trainer, fault, "hang", "mismatch", line))
    return cases


MORE = {
    ("fsdp2", "endless"),
    ("fsdp2_tp", "gil"),
    ("fsdp2_tp", "skip_subgroup"),
    ("gpipe", "read_socket"),
    ("1f1b", "caught"),
    ("accumulation", "skip_subgroup"),
}
CASES = _cases()
