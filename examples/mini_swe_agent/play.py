"""One episode of mini-swe-agent: its agent loop and its shell, unmodified, with short prompts.

mini-swe-agent takes a model class of yours. This one speaks chat completions and imports little: an episode is so
short that importing LiteLLM, which the default class does, would take most of it.
"""

import json
import os
import sys
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.utils.actions_toolcall import (
    BASH_TOOL,
    format_toolcall_observation_messages,
    parse_toolcall_actions,
)

SYSTEM = "Do it with bash, then submit."
OBSERVATION = "<returncode>{{output.returncode}}</returncode>\n<output>\n{{output.output}}</output>"


class Policy:
    """The model at OPENAI_BASE_URL, offered the agent's own tool."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        url = urlsplit(os.environ["OPENAI_BASE_URL"])
        self.connection, self.path = HTTPConnection(url.netloc), url.path + "/chat/completions"

    def query(self, messages: list[dict[str, Any]], **kwargs: Any) -> dict[str, Any]:
        """The next turn; a turn without a valid call raises the FormatError of the agent."""
        sent = [{key: value for key, value in message.items() if key != "extra"} for message in messages]
        body = json.dumps({"model": "policy", "messages": sent, "tools": [BASH_TOOL]})
        key = os.environ["OPENAI_API_KEY"]
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self.connection.request("POST", self.path, body, headers)
        answer = self.connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {text.decode(errors='replace')}")
        message = json.loads(text)["choices"][0]["message"]
        calls = json.loads(json.dumps(message.get("tool_calls") or []), object_hook=lambda d: SimpleNamespace(**d))
        actions = parse_toolcall_actions(calls, format_error_template="{{ error }}")
        return {**message, "extra": {"actions": actions}}

    def format_message(self, **message: Any) -> dict[str, Any]:
        """A message of the agent."""
        return message

    def format_observation_messages(
        self, message: dict[str, Any], outputs: list[dict[str, Any]], template_vars: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """What the commands of a turn printed."""
        return format_toolcall_observation_messages(
            actions=message["extra"]["actions"],
            outputs=outputs,
            observation_template=OBSERVATION,
            template_vars=template_vars,
        )

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """Nothing that a prompt could name."""
        return {}

    def serialize(self) -> dict[str, Any]:
        """Nothing that a saved trajectory would need."""
        return {}


def main() -> None:
    """Play the task in the first argument; what came of the files is scored, not what is printed."""
    agent = DefaultAgent(
        Policy(),
        LocalEnvironment(timeout=5),
        system_template=SYSTEM,
        instance_template="{{task}}",
        step_limit=3,
        cost_limit=0.0,
    )
    print(agent.run(sys.argv[1]).get("exit_status", ""))


if __name__ == "__main__":
    main()
