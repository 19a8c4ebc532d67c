"""A separate process that receives broadcast weights like a server; used by test_lying_servers.py."""

from __future__ import annotations

from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as module

c10d: Any = module


def serve(pipe: Connection) -> None:
    """Answer commands with True, or with the text of an error, until the pipe closes."""
    group: Any = None
    while True:
        what, given = pipe.recv()
        try:
            if what == "join":
                group = _joined(given)
            elif what == "receive":
                for shape in given:
                    dist.broadcast(torch.empty(shape), src=0, group=group)
            elif what == "leave":
                dist.destroy_process_group(group)
                group = None
        except Exception as e:  # the test gets any error as text
            pipe.send(str(e))
        else:
            pipe.send(True)


def _joined(place: Any) -> Any:
    timeout = timedelta(seconds=3600)
    there = f"tcp://{place.host}:{place.port}"
    store, _, _ = next(c10d.rendezvous(there, place.first_rank, place.world_size, timeout=timeout))
    group, _ = c10d._new_process_group_helper(
        place.world_size,
        place.first_rank,
        [],
        c10d.Backend("gloo"),
        c10d.PrefixStore(place.name, store),
        group_name=place.name,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(place.world_size)}
    return group
