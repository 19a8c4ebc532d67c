"""Reward models: loaded here, in Ray workers, or behind an endpoint."""
