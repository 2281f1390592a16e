"""What transforms ask of a graph, and the changes that they make: constants, producers, shapes, replacing nodes."""
