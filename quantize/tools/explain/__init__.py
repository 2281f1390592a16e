"""`requant explain`: which kernels ran, and why the model is not faster."""
