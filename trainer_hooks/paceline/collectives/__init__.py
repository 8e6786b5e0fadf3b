"""Recording of torch.distributed.

functions.py   which functions are timed, and how to find their arguments
channels.py    sequence numbers of each process group and peer, on the state page
call.py        one collective or transfer from call to completion
wrappers.py    replaces the functions by timed ones
"""
