"""The request of a user: options, selection of nodes, effort, given ranges."""
