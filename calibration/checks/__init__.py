"""Findings: problems of the data or the model that the statistics and a few runs show."""
