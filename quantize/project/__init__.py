"""``requant.toml``: read a project, quantize as it says, and check the result."""
