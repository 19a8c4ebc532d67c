"""Playing tasks with a policy, without training on them: any checkpoint or endpoint, on any env."""
