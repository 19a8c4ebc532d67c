"""Engines sample tokens: the local PyTorch engine, inference servers, or your own."""
