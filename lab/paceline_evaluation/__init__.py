"""`paceline evaluate`: how well the diagnosis engine does, on jobs whose faults are known.

`campaign` plays trials: each is one job with at most one (or two) faults. The synthetic arm makes
up jobs (`shape`), plays their steps (`program`, `timeline`) under noise and faults (`faults`,
`conditions`), writes them as agents would (`emission`, `telemetry`, `standstill`) and feeds them to
the real engine (`trial`). The real arm (`real`) runs the reference trainer under real agents and a
real server. `scoring` judges what was found, `report` prints it.
"""
