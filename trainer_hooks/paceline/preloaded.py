"""Facts about the installed torch, looked up by the process that ranks are forked from.

The hooks keep them for the life of a process. So a rank that is forked from a process that has
imported this module starts 25 ms earlier. Nothing of torch is changed.
"""

import torch
import torch.distributed

from paceline.collectives.build import find_library
from paceline.hooks import reason_of_operators

find_library()
reason_of_operators(torch)
