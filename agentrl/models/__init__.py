"""Model folders: their device, whether packing is exact for them, and tiny models for tests and tutorials."""
