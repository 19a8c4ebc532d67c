"""The run folder: metrics, episodes, checkpoints."""
