"""The reference 3D-parallel trainer: a byte-level GPT, small enough to read in one sitting.

Read in this order: `settings` (options and placement), `mesh` (process groups), `data`, `parallel`
and `model` (tensor parallelism), `schedule` and `pipeline` (pipeline parallelism), `optimizer`,
`emulation`, `faults`, and `train`, which joins them. Checkpoints and requests of the server are
those of any script: `paceline.checkpoints` and `paceline.requests`.
"""
