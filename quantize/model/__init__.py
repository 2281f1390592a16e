"""A model as a file: load, save, shapes, types, metadata."""
