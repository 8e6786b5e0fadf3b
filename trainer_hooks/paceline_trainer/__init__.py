"""The reference 3D-parallel trainer: a byte-level GPT, small enough to read in one sitting.

Read in this order: `settings` (what a run is), `mesh` (who talks to whom), `data`, `parallel`
and `model` (tensor parallelism), `schedule` and `pipeline` (pipeline parallelism), `optimizer`,
`checkpoint`, `agreement` (commands at one step), `emulation`, `faults`, and `train`, which joins
them.
"""
