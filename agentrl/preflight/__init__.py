"""Checks before a run: memory estimates, rules, and a dry run of the environment."""
