"""Timing of torch.distributed."""
