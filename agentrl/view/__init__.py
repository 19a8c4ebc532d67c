"""Display episodes as text, and their tokens in color."""
