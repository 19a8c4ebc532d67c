"""Serve an environment to other trainers: OpenEnv sessions over WebSocket, and the Model Context Protocol."""
