"""The parts of the sandbox suite; `agentrl.testing.sandbox` puts them together."""
