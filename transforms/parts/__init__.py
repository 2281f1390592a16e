"""Rewrites and tables that transforms consist of."""
