"""Copies of the state in memory: on this node, and on another one.

Every few steps the state is copied to a file in shared memory, which outlives the process. Threads
hash it and send it to another node, across failure domains. A restart loads the newest step for
which all ranks have an intact copy; otherwise the checkpoint on disk
(docs/adr/0017-copies-in-memory-are-chosen-at-the-restart.md).

Read in this order: `copies` (what `Checkpoints` uses), `file` (the format), `directory`, `slots`
(writing), `schedule` (when), `holders` (where to), `transfer` and `held` (how), `recovery` (which
one to load), `state` (loading it).
"""
