"""The opsets from which operators take another form."""

AXES_ARE_INPUT = 13
"""The axes of Squeeze, Unsqueeze and ReduceSum are an input, and a Softmax is over one axis."""
REDUCED_AXES_ARE_INPUT = 18
"""The axes of the other reductions, such as ReduceMax, are an input."""
