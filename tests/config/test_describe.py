"""The page and the schema that describe the configuration."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from agentrl.config.describe import json_schema, page
from agentrl.config.run import RunConfig
from agentrl.config.schema import fields, sentence_at

ROOT = Path(__file__).parents[2]


def test_the_page_in_the_repository_is_current():
    assert (ROOT / "docs/configuration.md").read_text(encoding="utf-8") == page(), "run scripts/config-docs"


def test_the_page_names_every_key_with_its_meaning():
    text = page()
    for loc, _ in fields():
        assert any(f"`{name}" in text for name in (loc[-1], ".".join(loc)))
        if len(loc) > 1:
            assert sentence_at(loc), f"{'.'.join(map(str, loc))} has no sentence under it"


def test_the_script_says_whether_it_is_current(tmp_path: Path):
    script = ROOT / "scripts/config-docs"
    result = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stdout == "configuration.md is current\nalgorithms.md is current\n"


def test_the_json_schema_takes_both_forms_of_env_and_refuses_unknown_keys():
    schema = json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    assert [option.get("type") for option in schema["properties"]["env"]["anyOf"]] == ["string", None]
    rollout = schema["$defs"]["RolloutConfig"]["properties"]
    assert rollout["group_size"]["exclusiveMinimum"] == 0
    assert "compared with one another" in rollout["group_size"]["description"]
