"""Less work for a server that tests start on a CPU: SGLang or vLLM. Imported by a .pth line at interpreter start.

Each server is two or three processes, and each would import the same packages for ten seconds or more. Here they
are forks of the first, which has imported them, and looks for garbage rarely meanwhile. A process that uses CUDA
must not be forked.
"""

import gc
import multiprocessing
from multiprocessing.context import DefaultContext

gc.set_threshold(20_000, 20, 10)


def _forks(choose):
    def chosen(self, method=None, *args, **kwargs):
        return choose(self, "fork" if method == "spawn" else method, *args, **kwargs)

    return chosen


for _name in ("get_context", "set_start_method"):
    setattr(DefaultContext, _name, _forks(getattr(DefaultContext, _name)))
    setattr(multiprocessing, _name, getattr(multiprocessing.context._default_context, _name))
