"""Training existing agents unchanged: an endpoint per episode records every request token by token."""
