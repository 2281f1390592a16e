"""The processes of a command: the one that waits, its children, their temporary files. Only the standard library."""
