"""Tools that are ready to use, on top of a sandbox: name them in YAML, or take them over into an env of your own.

agentrl.tools.python:Python, agentrl.tools.shell:Shell, agentrl.tools.files:Files, agentrl.tools.sql:Sql
"""
