"""Engines over inference servers (SGLang, vLLM)."""
