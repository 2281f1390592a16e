"""One tensor or unit at a time in integers: the switchable model and its verdicts."""
