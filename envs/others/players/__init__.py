"""Programs that play other ecosystems' tasks in a separate Python; they import nothing from agentrl."""
