"""Sources of NCCL data: Inspector lines, the debug log, the environment of a process."""
