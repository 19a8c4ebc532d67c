"""Programs that play other ecosystems' tasks in a Python of their own; they import nothing of agentrl."""
