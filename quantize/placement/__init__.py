"""What becomes int8: rules, costs, minimum cut, plan files."""
