"""Runs of a model over data: inner tensors as outputs, workers, checkpoints, and the statistics that a run gathers."""
