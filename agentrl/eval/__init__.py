"""Evaluation without training: any checkpoint or endpoint, on any env."""
