"""`requant bench` and `compile`: time a model, session options, compiled models."""
