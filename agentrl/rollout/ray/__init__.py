"""Episodes played by Ray workers."""
