"""`python -m paceline_trainer`: one rank of a training run. Only this reads the environment."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from pathlib import Path

import click
import torch

from paceline.checkpoints.errors import CheckpointError
from paceline_trainer.errors import TrainerError, TrainerSettingsError
from paceline_trainer.schedule import SCHEDULES
from paceline_trainer.settings import DTYPES, ModelSettings, TrainerSettings, read_place
from paceline_trainer.train import check, train

_defaults = TrainerSettings()
_model = ModelSettings()


def _kernel_seconds(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[float, float] | None:
    if value is None:
        return None
    try:
        forward, backward = (float(part) / 1000 for part in value.split(","))
    except ValueError:
        raise click.BadParameter(
            f"expected two numbers FORWARD,BACKWARD such as 20,40, got {value!r}"
        ) from None
    if min(forward, backward) < 0:
        raise click.BadParameter("kernel times must be at least 0 ms")
    return forward, backward


def _layers(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(
            f"expected numbers of layers such as 3,3,2,4, got {value!r}"
        ) from None


@click.command(context_settings={"show_default": True, "max_content_width": 100})
@click.option("--dp", type=click.IntRange(1), help="Data-parallel size.  [default: PACELINE_DP]")
@click.option("--pp", type=click.IntRange(1), help="Pipeline stages.  [default: PACELINE_PP or 1]")
@click.option("--tp", type=click.IntRange(1), help="Tensor-parallel size.  [default: PACELINE_TP]")
@click.option("--schedule", type=click.Choice(list(SCHEDULES)), default=_defaults.schedule)
@click.option(
    "--virtual-stages",
    type=click.IntRange(1),
    default=_defaults.virtual_stages,
    help="Chunks of the model per pipeline stage; for --schedule interleaved.",
)
@click.option(
    "--stage-layers",
    metavar="N,N,...",
    callback=_layers,
    help="Layers of each stage (of each chunk, in the model's order).  [default: even]",
)
@click.option(
    "--zero",
    type=click.IntRange(0, 1),
    default=_defaults.zero,
    help="1: shard the optimizer state over the data-parallel ranks (ZeRO stage 1).",
)
@click.option(
    "--steps", type=click.IntRange(1), default=_defaults.steps, help="Number of steps to train."
)
@click.option("--seed", type=click.IntRange(0), default=_defaults.seed)
@click.option(
    "--global-batch-size",
    type=click.IntRange(1),
    default=_defaults.global_batch_size,
    help="Sequences per step, over all data-parallel ranks.",
)
@click.option("--microbatch-size", type=click.IntRange(1), default=_defaults.microbatch_size)
@click.option("--layers", type=click.IntRange(1), default=_model.layers)
@click.option("--width", type=click.IntRange(1), default=_model.width)
@click.option("--heads", type=click.IntRange(1), default=_model.heads)
@click.option("--sequence-length", type=click.IntRange(1), default=_model.sequence_length)
@click.option(
    "--sequence-spread",
    type=click.FloatRange(1),
    default=_defaults.sequence_spread,
    help="Ratio of the longest to the shortest sequence; shorter ones are padded.",
)
@click.option("--learning-rate", type=float, default=_defaults.learning_rate)
@click.option(
    "--gradient-clip",
    type=float,
    default=_defaults.gradient_clip,
    help="Maximum gradient norm; 0: no clipping.",
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), default=_defaults.dtype)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option(
    "--evaluate-every",
    type=click.IntRange(0),
    default=_defaults.evaluate_every,
    help="Steps between evaluations on held-out files; 0: never.",
)
@click.option(
    "--checkpoint-every",
    type=click.IntRange(0),
    default=_defaults.checkpoint_every,
    help="Steps between checkpoints; 0: only on command and at the end.",
)
@click.option(
    "--keep",
    type=click.IntRange(1),
    default=_defaults.checkpoints_kept,
    help="Checkpoints to keep.",
)
@click.option(
    "--checkpoint-directory",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="PACELINE_CHECKPOINT_DIRECTORY",
    show_envvar=True,
    help="Directory that all ranks share; without it, nothing is saved or resumed.",
)
@click.option(
    "--data-directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of the *.py files to train on.  [default: the standard library]",
)
@click.option(
    "--emulate-kernel-ms",
    metavar="F,B",
    callback=_kernel_seconds,
    help="On CPU: the forward (backward) of a microbatch takes at least F (B) ms, by sleeping. The "
    "times hold for full-length sequences and a chunk of average size. Enables the faults in "
    "NODE_DIRECTORY/faults.json.",
)
def main(
    dp: int | None,
    pp: int | None,
    tp: int | None,
    device: str,
    layers: int,
    width: int,
    heads: int,
    sequence_length: int,
    emulate_kernel_ms: tuple[float, float] | None,
    keep: int,
    **options: object,
) -> None:
    """Train a byte-level GPT on the sources of Python's standard library, as one rank.

    Start one process per rank with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, as
    `paceline run` and torchrun do. Without them, it trains with one rank.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # Ctrl-C must also end a rank that is blocked in gloo
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = TrainerSettings(
        model=ModelSettings(
            layers=layers, width=width, heads=heads, sequence_length=sequence_length
        ),
        device=device,
        emulated_kernel_seconds=emulate_kernel_ms,
        checkpoints_kept=keep,
        **options,  # type: ignore[arg-type]  # click has checked them
    )
    try:
        place = read_place(os.environ, dp=dp, pp=pp, tp=tp)
        check(settings, place.topology)
    except TrainerSettingsError as error:
        raise click.UsageError(str(error)) from error
    if place.master_address in ("127.0.0.1", "localhost", "::1"):
        # By default gloo listens on the address of the host name, which may not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        train(settings, place)
    except Exception as error:
        _die(place.rank, error)


def _die(rank: int, error: Exception) -> None:
    """Print the reason and exit immediately: a normal exit would join threads blocked on dead
    peers."""
    kind = "" if isinstance(error, TrainerError | CheckpointError) else f"{type(error).__name__}: "
    reason = str(error).strip().splitlines() or ["no reason given"]
    traceback.print_exception(error)
    print(f"Rank {rank} failed: {kind}{reason[0]}", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
