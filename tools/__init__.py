"""Tools that are ready to use: name them in YAML, or take them over into an env of your own.

On top of a sandbox: agentrl.tools.python:Python, agentrl.tools.shell:Shell, agentrl.tools.files:Files,
agentrl.tools.sql:Sql. Without one: agentrl.tools.search:Search (a local corpus) and agentrl.tools.http:Http (off
until hosts are named).
"""
