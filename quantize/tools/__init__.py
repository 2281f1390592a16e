"""Commands for any ONNX model."""
