"""Training: the loop, advantages, checkpoints, evaluation and the cold start."""
