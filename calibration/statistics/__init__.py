"""Statistics of tensors that merge exactly."""
