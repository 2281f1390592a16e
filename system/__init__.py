"""Requant and its surroundings: files that may be anything, text for people and logs, processes, temporary files."""
