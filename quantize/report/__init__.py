"""The report of a run: the run record, and the HTML pages that show it."""

from .gather import collect, finished
from .pages import Recorder, check_reports, report_runs, view_model, write_reports
from .record import Record, load_record

__all__ = [
    "Record",
    "Recorder",
    "check_reports",
    "collect",
    "finished",
    "load_record",
    "report_runs",
    "view_model",
    "write_reports",
]
