"""What rewrites and native operators look for in a graph: attention, linear operators, channels that share a scale."""
