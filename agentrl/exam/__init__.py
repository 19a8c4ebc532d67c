"""The exam of an environment: find faults that would teach a policy the wrong thing, before any training."""
