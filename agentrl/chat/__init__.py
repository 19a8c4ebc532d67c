"""Exact tokens: the renderer, the transcript ledger, the checks on both, and the tool-call parsers."""
