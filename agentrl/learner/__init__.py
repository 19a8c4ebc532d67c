"""The learner: packing, log-probabilities, losses and optimizer steps, on one rank or many."""
