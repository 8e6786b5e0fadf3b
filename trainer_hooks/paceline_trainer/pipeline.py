"""Execute a list of actions (`schedule`) on this rank's chunks of the model.

A receive blocks until its tensor has arrived. Sends are asynchronous and completed after the last
action, so no order of actions can make two stages block on each other's sends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

import paceline
from paceline_trainer.data import TokenBatch
from paceline_trainer.emulation import Emulation, length_share
from paceline_trainer.mesh import Mesh
from paceline_trainer.model import Chunk
from paceline_trainer.schedule import ScheduleAction
from paceline_trainer.settings import ModelSettings
from paceline_wire.spans import Op

_Key = tuple[int, int]  # (chunk, microbatch)
_SIDE = {Op.FORWARD_SEND: 1, Op.BACKWARD_RECV: 1, Op.FORWARD_RECV: -1, Op.BACKWARD_SEND: -1}


class StagePipeline:
    """The chunks of one rank; chunk c is part c * stages + stage of the model."""

    def __init__(
        self, chunks: Sequence[Chunk], mesh: Mesh, model: ModelSettings, emulation: Emulation
    ) -> None:
        self.chunks = chunks
        self.mesh = mesh
        self.width = model.width
        self.emulation = emulation
        self.stage = mesh.place.coordinates.pp_rank
        self.stages = mesh.place.topology.pp
        average = model.layers / (self.stages * len(chunks))
        self.shares = [len(chunk.blocks) / average for chunk in chunks]

    def run(
        self, actions: Sequence[ScheduleAction], batch: TokenBatch, loss_scale: float
    ) -> Tensor:
        """Train on `batch`: accumulate the gradients of loss_scale x the microbatches' losses.

        Returns that scaled sum of losses on the ranks of the last part, else zero.
        """
        with torch.enable_grad():
            return _ScheduleRun(self, batch, loss_scale, self.emulation).run(actions)

    def evaluate(
        self, actions: Sequence[ScheduleAction], batch: TokenBatch, loss_scale: float
    ) -> Tensor:
        """Return the scaled sum of losses, without gradients and without emulated kernels."""
        with torch.no_grad():
            return _ScheduleRun(self, batch, loss_scale, Emulation.off()).run(actions)


class _ScheduleRun:
    """The tensors in flight during one execution of a schedule."""

    def __init__(
        self, pipeline: StagePipeline, batch: TokenBatch, loss_scale: float, emulation: Emulation
    ) -> None:
        self.pipeline = pipeline
        self.loss_scale = loss_scale
        self.emulation = emulation
        device = pipeline.mesh.device
        tokens = batch.tokens.to(device)
        self.tokens, self.targets = tokens[:, :, :-1], tokens[:, :, 1:]
        longest = self.tokens.shape[-1]
        self.lengths: list[list[int]] = batch.lengths.tolist()
        self.is_padded = bool((batch.lengths < longest).any())
        precision = next(pipeline.chunks[0].parameters()).dtype
        self.weights = _weights(
            batch.lengths.to(device), longest, torch.promote_types(precision, torch.float32)
        )
        self.inputs: dict[_Key, Tensor] = {}
        self.outputs: dict[_Key, Tensor] = {}
        self.gradients: dict[_Key, Tensor] = {}  # gradients with respect to an output
        # keeps the tensors alive until they are sent
        self.sends: list[tuple[dist.Work, Tensor]] = []
        self.loss = torch.zeros((), dtype=torch.float64, device=device)

    def run(self, actions: Sequence[ScheduleAction]) -> Tensor:
        for action in actions:
            peer = self._peer_stage(action)
            computes = peer is None
            with paceline.pipelining(
                action.op,
                microbatch=action.microbatch,
                chunk=action.chunk,
                peer=None if peer is None else self.pipeline.mesh.stage_peer(peer),
                lengths=self.lengths[action.microbatch] if computes and self.is_padded else None,
            ):
                if peer is None:
                    self._compute(action)
                else:
                    self._transfer(action, peer)
        for work, _ in self.sends:
            work.wait()
        return self.loss

    def _compute(self, action: ScheduleAction) -> None:
        key = (action.chunk, action.microbatch)
        share = self.pipeline.shares[action.chunk]
        if self.is_padded:
            share *= length_share(self.lengths[action.microbatch], self.tokens.shape[-1])
        with self.emulation.kernel(action.op, share):
            match action.op:
                case Op.FORWARD:
                    self._forward(key)
                case Op.BACKWARD:
                    self._backward(key)
                case _:
                    raise ValueError(f"the pipeline has no such action: {action}")

    def _transfer(self, action: ScheduleAction, peer: int) -> None:
        key = (action.chunk, action.microbatch)
        match action.op:
            case Op.FORWARD_RECV:
                received = self._receive(peer)
                self.inputs[key] = received.requires_grad_(torch.is_grad_enabled())
            case Op.FORWARD_SEND:
                self._send(self.outputs[key].detach(), peer)
                if not torch.is_grad_enabled():
                    del self.outputs[key]
            case Op.BACKWARD_RECV:
                self.gradients[key] = self._receive(peer)
            case Op.BACKWARD_SEND:
                gradient = self.inputs.pop(key).grad
                assert gradient is not None, f"{action} before its backward"
                self._send(gradient, peer)

    def _forward(self, key: _Key) -> None:
        chunk, microbatch = self.pipeline.chunks[key[0]], key[1]
        if chunk.first:
            self.inputs[key] = self.tokens[microbatch]
        if not chunk.last:
            self.outputs[key] = chunk(self.inputs[key])
            return
        loss = chunk(self.inputs[key], self.targets[microbatch], self.weights[microbatch])
        loss = loss * self.loss_scale
        self.loss += loss.detach()
        if torch.is_grad_enabled():
            self.outputs[key] = loss

    def _backward(self, key: _Key) -> None:
        torch.autograd.backward(self.outputs.pop(key), self.gradients.pop(key, None))
        if self.pipeline.chunks[key[0]].first:
            del self.inputs[key]

    def _receive(self, peer: int) -> Tensor:
        pipeline = self.pipeline
        _, size, length = self.tokens.shape
        parameter = next(pipeline.chunks[0].parameters())
        buffer = torch.empty(
            size, length, pipeline.width, dtype=parameter.dtype, device=parameter.device
        )
        source = pipeline.mesh.stage_peer(peer)
        work = dist.irecv(buffer, source, group=pipeline.mesh.link(peer, pipeline.stage))
        assert work is not None, "both ends of a transfer are members of its group"
        work.wait()
        self.emulation.faults.after_receive(source)
        return buffer

    def _send(self, value: Tensor, peer: int) -> None:
        mesh = self.pipeline.mesh
        value = value.contiguous()
        work = dist.isend(value, mesh.stage_peer(peer), group=mesh.link(self.pipeline.stage, peer))
        assert work is not None, "both ends of a transfer are members of its group"
        self.sends.append((work, value))

    def _peer_stage(self, action: ScheduleAction) -> int | None:
        """Return the stage at the other end of a transfer; None for a compute action."""
        side = _SIDE.get(action.op)
        return None if side is None else (self.pipeline.stage + side) % self.pipeline.stages


def _weights(lengths: Tensor, longest: int, dtype: torch.dtype) -> Tensor:
    """Return the weight of each target: the loss is the mean of the sequences' mean losses."""
    inside = torch.arange(longest, device=lengths.device) < lengths.unsqueeze(-1)
    return inside.to(dtype) / (lengths.unsqueeze(-1) * lengths.shape[-1])
