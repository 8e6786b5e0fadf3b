"""`paceline evaluate`: measure the diagnosis engine on jobs whose faults are known.

A campaign (`campaign`) is a number of trials; a trial is one job with no, one or two faults.

The synthetic arm draws a job (`shape`) and its faults (`plans`, `faults`), computes its steps
(`program`, `timeline`) under noise and faults (`conditions`), converts them to the batches that
agents send (`emission`, `telemetry`, `state_pages`) and feeds these to the real engine
(`synthetic_job`, `endings`, `trial`).

The real arm (`real`, `inject`) runs the reference trainer with real agents and a real server.

`scoring` compares the findings with the faults; `report` prints the result.
"""
