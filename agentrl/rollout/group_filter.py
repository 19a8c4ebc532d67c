"""The user's function that decides which groups may train: `rollout.group_filter`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from agentrl.env.load import said_by
from agentrl.errors import AgentRLError, ConfigError, traceback_of
from agentrl.importing import check_call, load_function
from agentrl.types import Group

GroupFilter = Callable[[Group], bool]


def load_filter(use: str) -> GroupFilter:
    """The function named as `module:function` or `path/to/file.py:function`; what it returns is checked.

    Raises:
        ConfigError: it cannot be loaded or called with a group; later, it raises or returns anything but True or
            False.
    """
    where = f"rollout.group_filter {use}"
    try:
        function = load_function(use, where)
    except ConfigError as e:
        raise e if str(e).startswith(where) else ConfigError(f"rollout.group_filter {e}") from None
    if isinstance(function, type):
        raise ConfigError(f"{where}: is a class, not a function")
    check_call(function, f"{where}:", "group")

    def trains(group: Group) -> bool:
        try:
            found = function(group)
        except AgentRLError:
            raise
        except (Exception, SystemExit) as e:
            raise ConfigError(
                f"{where}: raised {said_by(e)} on a group of task {group.task.id}\n{traceback_of(e)}"
            ) from e
        if not isinstance(found, bool | np.bool_):
            raise ConfigError(f"{where}: must return True or False, got {found!r:.200}")
        return bool(found)

    return trains
