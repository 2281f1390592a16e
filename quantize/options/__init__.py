"""What a user may ask for: options, selection of nodes, effort, given ranges."""
