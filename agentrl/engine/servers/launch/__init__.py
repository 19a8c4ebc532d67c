"""Starting inference servers, here or through Ray, and ending them."""
