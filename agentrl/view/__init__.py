"""See the docstrings of the modules inside."""
