"""Advantages, policy losses, KL penalties and corrections: pure functions on tensors."""
