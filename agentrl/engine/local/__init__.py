"""The local PyTorch engine."""
