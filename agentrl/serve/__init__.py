"""The policy behind an OpenAI-compatible endpoint, with the tokens that it would see in training."""
