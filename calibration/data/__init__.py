"""Data sources: what the text after ``--data`` names, as samples that can be read repeatedly."""
