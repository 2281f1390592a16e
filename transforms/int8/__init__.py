"""A plan of what becomes int8, and the graph with integers that it describes."""
