"""What-if replay: what a run costs when some of its operations are as fast as their peers.

A recorded trace is aligned into arrays (`trace`) and its dependencies are found once from one data
parallel rank of one step (`dependencies`); the steps of a running job likewise (`window`, `order`).
Laid out in levels (`model`), they are replayed for all steps, data-parallel ranks and
counterfactuals at once (`replay`). `analysis` asks the questions, `verdict` says the answer in a
sentence, `online` and `fixes` say what a repair of a running job would give. `schedules` simulates
pipelines that nobody ran. Only `reader` touches a file. The whole is in docs/what-if.md.

Method: "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025.
"""
