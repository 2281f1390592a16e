"""Range rules: pure functions from the statistic of a tensor to its range, and the scale and zero point of a range."""
