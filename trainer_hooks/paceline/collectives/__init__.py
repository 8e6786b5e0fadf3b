"""Recording of process groups.

operations.py   torch's c10d operators, and where to find their arguments
channels.py     sequence numbers of each process group and peer, on the state page
call.py         one collective or transfer from launch to completion
coverage.py     releases and backends of torch that cannot be recorded, and why
process_groups.py   kernels on the operators, and what waits for their results
"""
