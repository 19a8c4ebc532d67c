"""A spec whose fields have other types is refused where it is written, by the name of the field."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.sandbox import Sandbox


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"backend": 3}, "backend=3: must be text"),
        ({"image": None}, "image=None: must be text"),
        ({"env": 3}, r'env=3: must be a tuple of pairs of texts, \(\("NAME", "value"\),\)'),
        ({"env": {"A": "1"}}, "must be a tuple of pairs of texts"),
        ({"env": (("A", 1),)}, "must be a tuple of pairs of texts"),
        ({"readonly": "/usr"}, "readonly='/usr': must be a tuple of texts"),
        ({"require": "files"}, "require='files': must be a tuple of texts"),
        ({"memory_mb": None}, "memory_mb must be a number, got None"),
        ({"wall_s": None}, "wall_s must be a number, got None"),
        ({"stdout_bytes": "1"}, "stdout_bytes must be a whole number, got '1'"),
        ({"network": "yes"}, "network='yes': must be True or False"),
        ({"run_as": "root"}, "run_as='root': must be a user id"),
        ({"ttl_s": None}, "ttl_s=None: must be a number"),
    ],
)
def test_a_field_of_another_type_is_named(given: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        Sandbox(**given)


def test_what_may_be_left_open_may():
    assert Sandbox(cpu_s=None, cpus=None, python=None, require=None, runtime=None).cpus is None
