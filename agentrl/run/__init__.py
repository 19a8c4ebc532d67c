"""The folder that a run leaves, and what it tells while it goes."""
