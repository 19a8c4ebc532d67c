"""The files of `agentrl env package --as verifiers`: `taskset.py` is copied unchanged, next to its settings."""
