"""Runs, rollouts and training rows from Python programs and notebooks (docs/python.md)."""
