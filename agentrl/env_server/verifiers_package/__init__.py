"""What `agentrl env package --as verifiers` writes: `taskset.py` is copied as it is, with settings next to it."""
