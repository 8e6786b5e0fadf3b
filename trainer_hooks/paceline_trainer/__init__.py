"""The reference 3D-parallel trainer: a byte-level GPT, small enough to read in one sitting.

Read in this order: `settings` (options and placement), `mesh` (process groups), `data`, `parallel`
and `model` (tensor parallelism), `schedule` and `pipeline` (pipeline parallelism), `optimizer`,
`checkpoint`, `agreement` (all ranks act on a command at the same step), `emulation`, `faults`, and
`train`, which joins them.
"""
