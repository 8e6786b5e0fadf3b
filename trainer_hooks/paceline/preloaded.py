"""Preparations of the process that ranks are forked from, once it has imported torch.

Facts about the installed torch, which the hooks keep for the life of a process: a rank starts 25 ms
earlier. And the ranks meet as soon as rank 0 listens, also if the script does not use Paceline.
"""

import torch
import torch.distributed

from paceline.collectives.build import find_library
from paceline.hooks import reason_of_operators
from paceline.rendezvous import wait_in_torch

find_library()
reason_of_operators(torch)
wait_in_torch()
