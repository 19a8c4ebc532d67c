"""Sampling episodes: single episodes, groups, scheduling, Ray workers and reward models."""
