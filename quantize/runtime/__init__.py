"""What the installed ONNX Runtime can run, what it ran, and how long it took."""
