"""The command line: parse, call, print, exit code. The only package below `cli.py` that imports click."""
