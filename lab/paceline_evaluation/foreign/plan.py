"""The plan of a trial of the foreign arm: its training, what else runs, and its fault."""

from __future__ import annotations

import random
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle, islice

KINDS = ("none", "slow_rank", "slow_link", "data_stall", "gc", "hang", "crash")

# The ways in which each kind of fault occurs.
FAULTS: dict[str, tuple[str, ...]] = {
    "none": ("none",),
    "slow_rank": ("slow_compute", "slow", "hog"),
    "slow_link": ("rate_limit",),
    "data_stall": ("slow_data",),
    "gc": ("garbage",),
    "hang": (
        *("stop", "lock", "left", "endless", "gil", "read_socket", "read_file", "caught"),
        "another_op",
    ),
    "crash": (
        *("sigkill", "error", "sigsegv", "exit", "leak", "sigterm", "disconnect", "all_killed"),
        *("all_terminated", "reset", "worker_leak", "nccl_error"),
    ),
}
SCRIPTS = {"hugging_face": "hugging_face.py", "lightning": "lightning_ddp.py"}
PLAIN = ("ddp", "accumulation", "fsdp2", "fsdp2_tp", "gpipe", "1f1b")
TRAINERS = (*PLAIN, *SCRIPTS)
_PACKAGES = {"hugging_face": "transformers", "lightning": "lightning"}
_LOOP_FAULTS = frozenset({"left", "exit", "caught"})  # only train.py has them
_FOUR_RANKS = frozenset({"fsdp2_tp", "gpipe", "1f1b"})
MOST_RANKS = 8
_SURROUNDINGS_SHARE = 0.3  # share of trials that have each of them


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Other activity in a healthy training and on its machine."""

    hogs: int = 0
    at_times: bool = False  # they compute for some seconds at a time
    is_disk_busy: bool = False
    arguments: tuple[str, ...] = ()  # the arguments of the script

    def text(self) -> str:
        words = [f"{self.hogs} hogs" + " at times" * self.at_times] * (self.hogs > 0) + [
            "busy disk"
        ] * self.is_disk_busy
        return ", ".join([*words, " ".join(self.arguments)]).strip(", ") or "quiet"


@dataclass(frozen=True, slots=True)
class Plan:
    """One trial. `magnitude` is what the fault adds to the step, as a share of it."""

    kind: str
    fault: str
    trainer: str
    ranks: int
    faulty_rank: int
    magnitude: float
    healthy_seconds: float  # from the end of the warm-up to the fault
    surroundings: Surroundings

    @property
    def script(self) -> str:
        return SCRIPTS.get(self.trainer, "train.py")


def available_trainers(largest: int = MOST_RANKS) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the trainers that can run here on so many ranks, and a sentence for each that is not
    installed."""
    missing = [name for name, package in _PACKAGES.items() if find_spec(package) is None]
    skipped = tuple(f"{name}: the package {_PACKAGES[name]} is not installed" for name in missing)
    small = tuple(name for name in TRAINERS if largest >= 4 or name not in _FOUR_RANKS)
    return tuple(name for name in small if name not in missing), skipped


def draw_plans(
    kind: str, trials: int, seed: int, trainers: tuple[str, ...], largest: int = MOST_RANKS
) -> list[Plan]:
    """Return the plans of a kind. Faults and trainers occur in turn, in random order."""
    chance = random.Random(f"{seed} {kind}")
    faults = list(FAULTS[kind])
    chance.shuffle(faults)
    order = list(trainers)
    chance.shuffle(order)
    queue = list(order)
    plans = []
    for fault in islice(cycle(faults), trials):
        trainer = next(name for name in queue if name in PLAIN or fault not in _LOOP_FAULTS)
        queue.remove(trainer)
        queue = queue if len(queue) > len(order) // 2 else [*queue, *order]
        plans.append(_draw(chance, kind, fault, trainer, largest))
    return plans


def _draw(chance: random.Random, kind: str, fault: str, trainer: str, largest: int) -> Plan:
    sizes = (4, 4, 8) if trainer in _FOUR_RANKS else (2, 4, 4, 4, 6, 8)
    ranks = chance.choice([size for size in sizes if size <= largest])
    return Plan(
        kind=kind,
        fault=fault,
        trainer=trainer,
        ranks=ranks,
        faulty_rank=chance.randrange(ranks),
        magnitude=_draw_magnitude(chance, fault),
        healthy_seconds=chance.uniform(6.0, 15.0),
        surroundings=_draw_surroundings(
            chance, trainer, ranks, loads=fault == "worker_leak", is_healthy=kind == "none"
        ),
    )


def _draw_magnitude(chance: random.Random, fault: str) -> float:
    # A shared CPU or link has no exact cost: it is measured, and has to be large enough.
    least = {"hog": 0.8, "rate_limit": 0.5, "garbage": 0.3}.get(fault, 0.1)
    return chance.uniform(least, 2.0)


def _draw_surroundings(
    chance: random.Random, trainer: str, ranks: int, *, loads: bool, is_healthy: bool
) -> Surroundings:
    """Draw what else runs.

    `loads`: certainly a loader worker. `is_healthy`: evaluations may take as long as they like; a
    fault would be injected into a long one.
    """

    def is_drawn() -> bool:
        return chance.random() < _SURROUNDINGS_SHARE

    hogs = chance.choice((1, 2)) if is_drawn() else 0
    at_times = hogs > 0 and chance.random() < 0.5
    is_disk_busy, loads = is_drawn(), is_drawn() or loads
    recompiles, varies, evaluates, saves, collects = (is_drawn() for _ in range(5))
    rows = max(8, 192 // ranks)
    arguments = ["--batch", str(rows)]
    if trainer == "hugging_face":
        arguments = ["--batch", str(max(2, 24 // ranks))]
    arguments += ["--workers", "1"] * loads
    arguments += ["--checkpoint-every", "150"] * saves
    if trainer != "hugging_face":
        arguments += ["--evaluate-every", "120"] * evaluates
    if trainer in PLAIN:
        arguments += ["--collect-every", "97"] * collects
        if evaluates and is_healthy:
            arguments += ["--evaluate-seconds", str(chance.choice((0, 10, 30)))]
        if trainer not in ("gpipe", "1f1b"):  # pipelines need batches of one size
            arguments += ["--variable-lengths"] * varies
        if trainer in ("ddp", "accumulation"):
            arguments += ["--compile"] * recompiles
        arguments = ["--trainer", trainer, *arguments]
    return Surroundings(hogs, at_times, is_disk_busy, tuple(arguments))
