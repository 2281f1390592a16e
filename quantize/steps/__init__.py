"""The steps of `quantize_model`: prepare, simplify, ranges, evidence, emit, judge, deliver."""
