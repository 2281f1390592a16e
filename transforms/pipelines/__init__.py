"""Pipelines of transforms: their grammar, groups and plug-ins, and the check of a model after each step."""
