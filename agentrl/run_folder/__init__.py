"""The folder that a run leaves: metrics, episodes, checkpoints."""
