"""Decide which units become int8: rules, costs, minimum cut, plan files."""
