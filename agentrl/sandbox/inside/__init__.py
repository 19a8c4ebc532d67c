"""What runs on the far side: the keeper, the supervisor of one sandbox, and the programs it starts.

These modules need the standard library only and import nothing else of agentrl: their source travels to where
they run (a lean Python on this machine, or a container), so any Python from 3.9 will do.
"""
