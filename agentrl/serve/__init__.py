"""Serve the policy behind an OpenAI-compatible endpoint, with the same tokens as in training."""
