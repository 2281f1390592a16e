"""The float model: its file, ONNX Runtime sessions, states and fingerprints."""
