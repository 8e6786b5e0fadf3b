"""Why is a rank, a node or a link slow? What its node measured, weighed.

Each *check* looks at one part of the node (`clocks`, `gpu_memory`, `pcie`, `network`, ...) and
says for each cause it knows how strongly its metrics speak for or against it. That is a likelihood
ratio: how much likelier this measurement is if the cause is real than if it is not, as its
decimal logarithm (`weight`; 2 is "a hundred to one for", -1 "ten to one against"). `weighing.py`
makes it from four questions:

1. *Strength*: how far is the value from what it should be, in units of what is no deviation at all?
   It must differ from the node's own past and from its peers, whichever is closer: a GPU that
   always ran at a lower clock did not become slow by it, and what all nodes share singles out none.
2. *Time*: did the metric change when the slowness began? A change minutes off is a coincidence.
3. *Magnitude*: can it explain the slowdown? 1980 MHz over 795 MHz explains 2.49x; a clock that is
   3% lower does not explain 40%. Not asked of what has no known price (an ECC error).
4. *Agreement*: several metrics of one cause (a reason, a clock, a temperature) are not
   independent: the strongest counts, each other shifts it a little.

The weights move prior odds, how often each cause is met (per kind of finding, `catalogue.py`), to
likelihoods (Bayes' rule, with one cause at a time). What was not measured moves nothing and its
prior counts as unknown. Weights are capped: no metric is that trustworthy. A cause is named when it
is likelier than `unknown`; otherwise the answer is "unknown, but not: ..." with what was ruled out.
"""

from paceline_server.detect.causes.catalogue import CAUSES, UNKNOWN, CauseInfo
from paceline_server.detect.causes.diagnose import Diagnosis, diagnose

__all__ = ["CAUSES", "UNKNOWN", "CauseInfo", "Diagnosis", "diagnose"]
