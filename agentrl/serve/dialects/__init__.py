"""The request formats of the endpoint: chat completions, completions, responses."""
