"""`requant inspect`, `diff` and `ops`: what a model is made of. Nothing is run."""
