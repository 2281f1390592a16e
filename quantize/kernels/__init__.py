"""Native operators of the domain ``ai.requant`` for ONNX Runtime: their sources, their build, and how to load them."""
