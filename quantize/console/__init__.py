"""Results as tables on the terminal. The only package that imports rich."""
