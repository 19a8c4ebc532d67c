"""Tests of agentrl.python."""
