"""What can be known before a run starts: memory and time, rules, and a dry run of the environment."""
