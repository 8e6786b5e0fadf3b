"""What-if replay: the step time of a run if some of its operations were as fast as their peers.

`trace` aligns a recorded trace into arrays, and `dependencies` derives the dependencies from one
data-parallel rank of one step. `window` and `order` do the same for the steps of a running job.
`model` arranges the operations in levels, and `replay` replays all steps, data-parallel ranks and
counterfactuals at once. `analysis` computes the slowdowns, and `verdict` summarizes them in one
sentence. `online` and `fixes` compute the gain of a repair for a running job. `schedules` simulates
pipeline schedules. Only `reader` reads files. docs/what-if.md describes all of it.

Method: "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025.
"""
