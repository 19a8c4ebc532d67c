"""Exact tokens: the renderer, the transcript of token ids, checks on both, and tool-call parsers."""
