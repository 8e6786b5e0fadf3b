"""The training loop of one rank."""

from __future__ import annotations

import gc
import logging
import math
import time
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

import paceline
from paceline import requests
from paceline.checkpoints.storage import Checkpointer
from paceline_trainer.data import Loader, Sequences, TokenBatch, read_corpus, validation_batch
from paceline_trainer.emulation import start_emulation
from paceline_trainer.errors import TrainerSettingsError
from paceline_trainer.mesh import Mesh, connect, disconnect
from paceline_trainer.model import Chunk, initialize, shards
from paceline_trainer.optimizer import AdamW, DataParallel
from paceline_trainer.parallel import TensorParallel
from paceline_trainer.pipeline import StagePipeline
from paceline_trainer.schedule import SCHEDULES, ScheduleShape, forward_only, plan
from paceline_trainer.settings import DTYPES, RankPlacement, TrainerSettings
from paceline_wire.topology import Topology

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class TrainingResult:
    """The result of a run, the same on every rank."""

    first_step: int = 0
    losses: list[float] = field(default_factory=list)  # one for each step from `first_step` on
    gradient_norms: list[float] = field(default_factory=list)
    # by number of completed steps
    evaluation_losses: dict[int, float] = field(default_factory=dict)


def train(
    settings: TrainerSettings, place: RankPlacement, store: Store | None = None
) -> TrainingResult:
    """Join the process groups, resume from the best checkpoint, train to the end or a stop command.

    Raises:
        TrainerSettingsError: the settings do not fit each other or the topology.
        CheckpointError: a newer generation has claimed the checkpoint directory.
        GpuLostError: the rank's GPU is lost.
        RuntimeError: from torch.distributed, if a peer dies.
    """
    check(settings, place.topology)
    torch.set_num_threads(1)  # ranks share the host's cores, and the layers are small
    paceline.init(
        dp_rank=place.coordinates.dp_rank,
        pp_rank=place.coordinates.pp_rank,
        tp_rank=place.coordinates.tp_rank,
        topology=place.topology,
        metadata=describe(settings, place.topology),
    )
    trainer = Trainer(settings, place, connect(settings, place, store))
    outcome = trainer.run()
    paceline.finish()
    disconnect()
    return outcome


def check(settings: TrainerSettings, topology: Topology) -> None:
    """Raise TrainerSettingsError if the settings do not fit each other or the topology."""
    settings.model.check(topology)
    settings.microbatches(topology)
    settings.layers_of_chunks(topology)
    if settings.schedule not in SCHEDULES:
        raise TrainerSettingsError(
            f"--schedule must be one of {', '.join(SCHEDULES)}, got {settings.schedule!r}"
        )
    settings.check_schedule(topology)


def describe(settings: TrainerSettings, topology: Topology) -> dict[str, str]:
    """Return the metadata of the job, for `paceline.init`."""
    model = settings.model
    metadata = {
        "framework": f"torch {torch.__version__}",
        "trainer": "paceline_trainer",
        "schedule": settings.schedule,
        "microbatches": str(settings.microbatches(topology)),
        "virtual_stages": str(settings.virtual_stages),
        "stage_layers": ",".join(str(len(part)) for part in settings.layers_of_chunks(topology)),
        "zero": str(settings.zero),
        "sequence_spread": f"{settings.sequence_spread:g}",
        "global_batch_size": str(settings.global_batch_size),
        "device": settings.device,
        "dtype": settings.dtype,
        "layers": str(model.layers),
        "width": str(model.width),
        "sequence_length": str(model.sequence_length),
    }
    if settings.emulated_kernel_seconds is not None and settings.device == "cpu":
        forward, backward = settings.emulated_kernel_seconds
        metadata["emulated_kernel_ms"] = f"{forward * 1000:g},{backward * 1000:g}"
    return metadata


class Trainer:
    """The model, data and state of one rank, and its training loop."""

    def __init__(self, settings: TrainerSettings, place: RankPlacement, mesh: Mesh) -> None:
        self.settings = settings
        self.place = place
        self.mesh = mesh
        self.outcome = TrainingResult()
        topology, own = place.topology, place.coordinates
        self.microbatches = settings.microbatches(topology)
        parallel = TensorParallel(mesh.tensor, own.tp_rank, topology.tp)
        layers = settings.layers_of_chunks(topology)[own.pp_rank :: topology.pp]
        chunks = [Chunk(settings.model, parallel, DTYPES[settings.dtype], part) for part in layers]
        for chunk in chunks:
            initialize(chunk, parallel, settings.seed)
            chunk.to(mesh.device)
        self.optimizer = AdamW(
            [shard for chunk in chunks for shard in shards(chunk)],
            parallel,
            settings.weight_decay,
            DataParallel(
                mesh.data, own.dp_rank, topology.dp, settings.zero == 1 and topology.dp > 1
            ),
        )
        self.emulation = start_emulation(settings, place, parallel)
        self.pipeline = StagePipeline(chunks, mesh, settings.model, self.emulation)
        self.actions = plan(
            SCHEDULES[settings.schedule], own.pp_rank, self._shape(self.microbatches)
        )
        self.agreement = requests.agreement()
        self.checkpointer = self._open_checkpoints()
        paceline.declare(checkpoint=self.checkpointer is not None, stop=True)

    def run(self) -> TrainingResult:
        training, validation = read_corpus(self.settings)
        self._announce(training)
        completed = self._resume()
        faults = self.emulation.faults
        loader = Loader(training, self.settings, self.place, completed, faults)
        gc.collect()
        # otherwise each full collection scans all imported modules, which takes 100 ms and more
        gc.freeze()
        started = time.perf_counter()
        for batch in paceline.steps(loader, start=completed):
            self._step(batch, completed)
            completed += 1
            if self._is_every(self.settings.evaluate_every, completed):
                self._evaluate(validation, completed)
            if self._is_every(self.settings.checkpoint_every, completed):
                self._checkpoint(completed)
            now = time.perf_counter()
            self._log_step(completed, now - started)
            started = now
            if self._follow_request(completed):
                break
        else:
            if self.checkpointer is not None and completed:
                self._checkpoint(completed)
        if self.checkpointer is not None:
            self.checkpointer.close()
        return self.outcome

    def _step(self, batch: TokenBatch, completed: int) -> None:
        """Train one step: accumulate gradients, reduce them, update."""
        topology = self.place.topology
        paceline.count(samples=batch.lengths.numel(), tokens=int(batch.lengths.sum()))
        loss = self.pipeline.run(self.actions, batch, 1 / (self.microbatches * topology.dp))
        if not self.emulation.faults.skips_collective():
            self.optimizer.reduce()
        loss_sum, norm = self._reduce(loss)
        with paceline.optimizer():
            clip = self.settings.gradient_clip
            scale = min(1.0, clip / norm) if clip and norm > 0 else 1.0
            warmup = min(1.0, (completed + 1) / max(1, self.settings.warmup_steps))
            self.optimizer.update(completed, self.settings.learning_rate * warmup, scale)
        self.optimizer.gather()
        self.outcome.losses.append(loss_sum)
        self.outcome.gradient_norms.append(norm)
        paceline.report(loss=loss_sum, gradient_norm=norm)

    def _reduce(self, loss: Tensor) -> tuple[float, float]:
        """Return the loss and the gradient norm of all ranks."""
        own = self.place.coordinates
        row = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        if own.tp_rank == 0:  # its tp peers have the same loss
            row[0] = loss
        if self.optimizer.counts():
            row[1] = self.optimizer.squared_norm()
        rows = row.new_empty(self.place.topology.world_size, len(row))
        dist.all_gather(list(rows.unbind()), row)
        table = rows.tolist()
        return sum(entry[0] for entry in table), math.sqrt(sum(entry[1] for entry in table))

    def _evaluate(self, validation: Sequences, completed: int) -> None:
        with paceline.evaluate():
            topology = self.place.topology
            batch = validation_batch(validation, self.settings, self.place)
            microbatches = len(batch.tokens)
            actions = plan(forward_only, self.place.coordinates.pp_rank, self._shape(microbatches))
            scale = 1 / (
                microbatches * topology.dp * topology.tp
            )  # all tp ranks have the same loss
            loss = self.pipeline.evaluate(actions, batch, scale)
            dist.all_reduce(loss)
        self.outcome.evaluation_losses[completed] = loss.item()
        paceline.report(evaluation_loss=loss.item())

    def _checkpoint(self, completed: int) -> None:
        """Start a checkpoint; training continues while it is written."""
        if self.checkpointer is not None:
            with paceline.checkpoint():
                self.emulation.faults.at_checkpoint()
                self.checkpointer.save(completed, self.optimizer.state())

    def _follow_request(self, completed: int) -> bool:
        """Do what the server requests of all ranks at this step, if anything. Return whether to
        stop."""
        request = None if self.agreement is None else self.agreement.at(completed)
        if self.agreement is None or request is None:
            return False
        done = True
        if request.wants_checkpoint:
            self._checkpoint(completed)
            with paceline.checkpoint():
                done = self.checkpointer is not None and self.checkpointer.wait()
        return self.agreement.finish(request, done)

    def _shape(self, microbatches: int) -> ScheduleShape:
        return ScheduleShape(self.place.topology.pp, microbatches, self.settings.virtual_stages)

    def _open_checkpoints(self) -> Checkpointer | None:
        if self.settings.checkpoint_directory is None:
            return None
        run = {
            "model": asdict(self.settings.model),
            "dtype": self.settings.dtype,
            "seed": self.settings.seed,
            "global_batch_size": self.settings.global_batch_size,
            "sequence_spread": self.settings.sequence_spread,
            "tp": self.place.topology.tp,
        }
        return Checkpointer(
            self.settings.checkpoint_directory,
            self.mesh.checkpoint,
            self.place.generation,
            run=run,
            keep=self.settings.checkpoints_kept,
            saved_step=self.place.saved_step,
            on_result=_report_checkpoint,
        )

    def _resume(self) -> int:
        step = None
        if self.checkpointer is not None:
            state = self.optimizer.state()
            step = self.checkpointer.load(state)
            self.optimizer.adopt(state)
            if step is not None:
                paceline.checkpoint_saved(step)
        self.outcome.first_step = step or 0
        if step and self.place.rank == 0:
            _log.info("Resuming at step %d.", step)
        return step or 0

    def _is_every(self, interval: int, completed: int) -> bool:
        return interval > 0 and completed % interval == 0

    def _announce(self, training: Sequences) -> None:
        if self.place.rank:
            return
        settings, topology = self.settings, self.place.topology
        _log.info(
            "Generation %d: dp %d x pp %d x tp %d on %s, %s, %d microbatches of %d sequences, "
            "%d layers of width %d, %.1f MB of text.",
            self.place.generation,
            topology.dp,
            topology.pp,
            topology.tp,
            settings.device,
            settings.schedule,
            self.microbatches,
            settings.microbatch_size,
            settings.model.layers,
            settings.model.width,
            training.count * training.length / 1e6,
        )

    def _log_step(self, completed: int, seconds: float) -> None:
        if self.place.rank == 0:
            held_out = self.outcome.evaluation_losses.get(completed)
            _log.info(
                "step %d  loss %.4f  %.3f s%s",
                completed,
                self.outcome.losses[-1],
                seconds,
                "" if held_out is None else f"  held-out loss {held_out:.4f}",
            )


def _report_checkpoint(step: int, failure: str | None) -> None:
    if failure is None:
        paceline.checkpoint_saved(step)
    else:
        paceline.checkpoint_failed(failure)
