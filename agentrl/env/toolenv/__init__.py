"""ToolEnv: tools and rewards from typed methods."""
