"""Diagnosis of a slow rank, node or link: `diagnosis.diagnose` weighs what its node measured.

Each *check* reads the metrics of one part of the node (`checks/clocks.py`, `checks/network.py`,
...) and returns, for each cause it knows, how strongly its metrics speak for or against it. This
is a likelihood ratio: how much likelier the measurement is with this cause than without it. It is
kept as a decimal logarithm, the `weight` (2: a hundred to one for, -1: ten to one against).
`weighing.py` computes it from four questions:

1. *Strength*: how far is the value from the expected one, in units of the normal variation? It must
differ from the node's own past and from its peers; the closer of the two counts. A clock that was
always lower does not explain why a GPU became slow. A value that all nodes share is no evidence
against any of them.
2. *Time*: did the metric change when the slowdown began? A change minutes away is a coincidence.
3. *Magnitude*: can it explain the slowdown? 1980 MHz over 795 MHz explains 2.49x. A clock that is
   3% lower does not explain 40%. Skipped if the cost is not known (an ECC error).
4. *Agreement*: several metrics of one cause (throttle reason, clock, temperature) are not
   independent. The strongest one counts, and the others adjust it slightly.

Bayes' rule turns the weights and the priors (`catalog.py`, per kind of finding) into likelihoods,
one cause at a time. A cause that was not measured keeps its prior, which counts as unknown. Weights
are capped, because no metric is fully reliable. A cause is named if it is likelier than `unknown`;
otherwise the diagnosis is "unknown, but not: ..." with the causes that were ruled out.
"""
