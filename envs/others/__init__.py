"""Environments of other projects, played unchanged; one small module each."""
