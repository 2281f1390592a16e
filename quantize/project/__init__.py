"""``requant.toml``: read a project, quantize its model, and check the result."""
