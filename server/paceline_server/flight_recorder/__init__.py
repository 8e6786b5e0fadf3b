"""PyTorch Flight Recorder dumps of a hang, read offline: which ranks caused it, and how.

`folder` reads files (`plain_pickle`, `dump`), `operations` joins the ranks' entries, `waiting`
says why each unfinished operation does not finish, `culprits` follows the waiting to its ends,
`report` says it all. Everything but `folder` is pure.
"""

from paceline_server.flight_recorder.dump import Dump, dump_from
from paceline_server.flight_recorder.errors import FlightRecorderError
from paceline_server.flight_recorder.report import HangReport, analyze, report

__all__ = ["Dump", "FlightRecorderError", "HangReport", "analyze", "dump_from", "report"]
