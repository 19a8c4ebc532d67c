"""Attention over packed rows, one module per kernel."""
