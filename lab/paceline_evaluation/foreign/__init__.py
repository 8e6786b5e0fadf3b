"""The foreign arm: trainings of torch, Hugging Face and Lightning in which no line is Paceline's.

Ranks compute for real. `paceline watch -- torchrun` starts them on two nodes, each of which is a
network namespace with an agent. Hogs, a busy disk, recompilation, variable lengths, evaluations and
checkpoints make healthy jobs uneven. Faults come from the script or from outside: a rate limit, a
process on the rank's CPU, a memory limit, a signal.
"""
