"""Start and stop inference servers, on this machine or through Ray."""
