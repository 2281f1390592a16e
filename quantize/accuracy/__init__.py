"""Float against INT8 on data: outputs, pairs, metrics, drops."""
