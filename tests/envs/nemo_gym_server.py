"""Example servers of the `nemo-gym` package, run by the Python that has it: `nemo_gym_server.py KIND PORT`."""

from __future__ import annotations

import sys
from unittest.mock import MagicMock

import uvicorn
from nemo_gym.server_utils import ServerClient
from resources_servers.example_session_state_mgmt.app import (
    StatefulCounterResourcesServer,
    StatefulCounterResourcesServerConfig,
)
from resources_servers.example_tool_call_multireward.app import (
    ToolCallMultiRewardResourcesServer,
    ToolCallMultiRewardResourcesServerConfig,
)

KINDS = {
    "counter": (StatefulCounterResourcesServer, StatefulCounterResourcesServerConfig),
    "parts": (ToolCallMultiRewardResourcesServer, ToolCallMultiRewardResourcesServerConfig),
}


def main() -> None:
    server, config = KINDS[sys.argv[1]]
    made = server(
        config=config(host="127.0.0.1", port=int(sys.argv[2]), entrypoint="", name="example"),
        server_client=MagicMock(spec=ServerClient),
    )
    uvicorn.run(made.setup_webserver(), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")


if __name__ == "__main__":
    main()
