"""Code that inference servers import: PyTorch only, in one file."""
