"""The settings that all ranks share, and the placement of one rank.

Both are built once, in `__main__`, and are immutable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

import torch

from paceline_trainer.errors import TrainerSettingsError
from paceline_wire.topology import Coordinates, Topology

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """A pre-norm GPT over bytes."""

    layers: int = 4
    width: int = 64
    heads: int = 4
    sequence_length: int = 64
    vocabulary: int = 256

    def check(self, topology: Topology) -> None:
        if self.heads % topology.tp or self.width % self.heads or self.vocabulary % topology.tp:
            raise TrainerSettingsError(
                f"--heads ({self.heads}) must divide --width ({self.width}) and be a multiple of "
                f"the tensor-parallel size ({topology.tp})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The settings of a run, the same on all ranks."""

    model: ModelSettings = ModelSettings()
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0
    steps: int = 200
    schedule: str = "1f1b"
    virtual_stages: int = 1  # chunks of the model per stage; more than 1: interleaved
    # layers of each chunk, in the model's order; None: even
    stage_layers: tuple[int, ...] | None = None
    zero: int = 0  # 1: the optimizer state is sharded over the dp ranks
    global_batch_size: int = 32  # sequences per optimizer step, over all dp ranks
    microbatch_size: int = 2
    learning_rate: float = 3e-3
    warmup_steps: int = 10
    weight_decay: float = 0.01
    gradient_clip: float = 1.0
    evaluate_every: int = 10  # every this many steps; 0: never
    evaluation_microbatches: int = 4  # per dp rank
    checkpoint_every: int = 0  # every this many steps; 0: only on command and at the end
    checkpoints_kept: int = 3
    checkpoint_directory: Path | None = None
    sequence_spread: float = 1.0  # longest / shortest sample
    data_directory: Path | None = None  # None: the standard library's own sources
    emulated_kernel_seconds: tuple[float, float] | None = None  # (forward, backward)
    timeout_seconds: float = 600.0  # timeout of collectives

    def microbatches(self, topology: Topology) -> int:
        """Return the number per data-parallel rank and step.

        Raises TrainerSettingsError if the batch is not divisible.
        """
        count, rest = divmod(self.global_batch_size, topology.dp * self.microbatch_size)
        if rest or not count:
            raise TrainerSettingsError(
                f"--global-batch-size {self.global_batch_size} must be a multiple of the "
                f"data-parallel size ({topology.dp}) times --microbatch-size "
                f"({self.microbatch_size})"
            )
        return count

    def layers_of_chunks(self, topology: Topology) -> list[range]:
        """Return the layers of each chunk in the model's order: chunk c of stage s is c * pp + s.

        Raises TrainerSettingsError if a chunk would have no layer.
        """
        chunks, layers = topology.pp * self.virtual_stages, self.model.layers
        if layers < chunks:
            raise TrainerSettingsError(
                f"{chunks} pipeline stages, including virtual ones, need at least as many layers, "
                f"got --layers {layers}"
            )
        if self.stage_layers is None:
            ends = [(chunk + 1) * layers // chunks for chunk in range(chunks)]
        else:
            ends = list(accumulate(self.stage_layers))
            if len(ends) != chunks or ends[-1] != layers or min(self.stage_layers) < 1:
                raise TrainerSettingsError(
                    f"--stage-layers needs {chunks} numbers from 1 that sum to --layers "
                    f"({layers}), got {','.join(map(str, self.stage_layers))}"
                )
        return [range(start, end) for start, end in pairwise([0, *ends])]

    def check_schedule(self, topology: Topology) -> None:
        """Raise TrainerSettingsError if chunks or microbatches do not fit the schedule."""
        if self.schedule != "interleaved":
            if self.virtual_stages > 1:
                raise TrainerSettingsError(
                    f"--virtual-stages {self.virtual_stages} needs --schedule interleaved, got "
                    f"{self.schedule}"
                )
            return
        if self.virtual_stages < 2 or topology.pp < 2:
            raise TrainerSettingsError(
                "--schedule interleaved needs --virtual-stages 2 or more, on two pipeline stages "
                f"or more; got {self.virtual_stages} on {topology.pp}"
            )
        if self.microbatches(topology) % topology.pp:
            raise TrainerSettingsError(
                f"--schedule interleaved needs a multiple of {topology.pp} (the pipeline stages) "
                f"microbatches, got {self.microbatches(topology)}; change --global-batch-size"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """The rank of this process, the rendezvous address, and its node's directory and GPU."""

    rank: int = 0
    local_rank: int = 0
    topology: Topology = field(default_factory=Topology)
    generation: int = 0
    saved_step: int | None = None  # newest step that the job is known to have saved
    master_address: str = "127.0.0.1"
    master_port: int = 0
    gpu_index: int | None = None
    node_directory: Path | None = None

    @property
    def coordinates(self) -> Coordinates:
        return self.topology.coordinates(self.rank)


def read_place(
    environment: Mapping[str, str],
    *,
    dp: int | None = None,
    pp: int | None = None,
    tp: int | None = None,
) -> RankPlacement:
    """Return the placement in the environment; axis sizes given as arguments take precedence.

    Without any sizes, all ranks are data-parallel.

    Raises:
        TrainerSettingsError: the product of the sizes is not the world size, or a variable is not
            a number.
    """
    rank, world_size = _number(environment, "RANK", 0), _number(environment, "WORLD_SIZE", 1)
    pp = pp or _number(environment, "PACELINE_PP", 1)
    tp = tp or _number(environment, "PACELINE_TP", 1)
    dp = dp or _number(environment, "PACELINE_DP", max(1, world_size // (pp * tp)))
    topology = Topology(dp, pp, tp)
    if topology.world_size != world_size or not 0 <= rank < world_size:
        raise TrainerSettingsError(
            f"dp {dp} x pp {pp} x tp {tp} is {topology.world_size} ranks, but this is rank "
            f"{rank} of WORLD_SIZE {world_size}; start one process per rank, as `paceline run` or "
            "torchrun does"
        )
    node_directory = environment.get("PACELINE_NODE_DIRECTORY")
    gpu_index = environment.get("PACELINE_GPU_INDEX")
    saved_step = environment.get("PACELINE_SAVED_STEP")
    return RankPlacement(
        rank=rank,
        local_rank=_number(environment, "LOCAL_RANK", 0),
        topology=topology,
        generation=_number(environment, "PACELINE_GENERATION", 0),
        saved_step=_number(environment, "PACELINE_SAVED_STEP", 0) if saved_step else None,
        master_address=environment.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(environment, "MASTER_PORT", 0),
        gpu_index=_number(environment, "PACELINE_GPU_INDEX", 0) if gpu_index else None,
        node_directory=Path(node_directory) if node_directory else None,
    )


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name)
    if not value:
        return default
    try:
        return int(value)
    except ValueError:
        raise TrainerSettingsError(f"{name} must be a whole number, got {value!r}") from None
