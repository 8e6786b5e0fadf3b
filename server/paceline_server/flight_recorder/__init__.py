"""PyTorch Flight Recorder dumps of a hang, read offline: which ranks caused it, and how.

`folder` reads files (`plain_pickle`, `dump`), `operations` joins the entries of all ranks,
`waiting` finds why each unfinished operation does not finish, `culprits` follows the waits to the
ranks that cause them, and `report` combines the results. Everything except `folder` is pure.
"""

from paceline_server.flight_recorder.dump import Dump, dump_from
from paceline_server.flight_recorder.errors import FlightRecorderError
from paceline_server.flight_recorder.report import HangReport, analyze, report

__all__ = ["Dump", "FlightRecorderError", "HangReport", "analyze", "dump_from", "report"]
