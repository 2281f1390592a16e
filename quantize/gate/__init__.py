"""The gate: a pair of models measured, compared with a baseline, and judged by tolerances."""
