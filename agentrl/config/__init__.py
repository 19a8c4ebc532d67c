"""One typed configuration: YAML in (`load_config`), resolved YAML out (`dump_config`)."""

from agentrl.config.dump import config_diff, dump_config
from agentrl.config.load import load_config
from agentrl.config.run import RunConfig

__all__ = ["RunConfig", "config_diff", "dump_config", "load_config"]
