"""Environments of other projects, played unchanged; `agentrl.config.schemes` names them."""
