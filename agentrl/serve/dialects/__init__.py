"""The dialects of the endpoint: chat completions, completions, responses."""
