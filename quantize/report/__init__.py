"""What was done to a model, in a form that one wants to look at: the run record and the pages made of it."""

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
