"""What the fork server imports once, for all engines that it forks; see `agentrl.engine.fork_server`."""

import gc
from importlib import import_module

from agentrl.garbage import collect_rarely

collect_rarely()
import_module("agentrl.engine.local.process")
gc.freeze()  # a collection in a fork would look at these objects, and copy their pages
