"""Checkpoints of any script: saved without blocking it, committed with hashes, resumed bit for bit.

Read in this order: `checkpoints` (what a script uses), `position` and `random_states` (the data),
`parts` and `states` (what is in a checkpoint), `trees`, `storage` (saving, verifying, loading),
`contents`, `layout` (the directory), `rank_group`.

torch.distributed.checkpoint is imported here, and not by `import paceline`.
"""
