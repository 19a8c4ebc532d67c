"""Sentences of the docs say what the last full runs of the benchmarks measured."""

from __future__ import annotations

import json
from typing import Any

from tests.docs.blocks import ROOT


def text(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def results(name: str) -> Any:
    return json.loads((ROOT / "bench/results" / f"{name}.json").read_text(encoding="utf-8"))


def test_what_the_doctor_named():
    found, page = results("doctor"), text("docs/doctor.md")
    assert found["named"] == found["faults"]
    assert found["false_alarms"] == 0
    assert all(variant["named"] for variant in found["variants"].values())
    assert f"named all {found['faults']} faults with the right setting" in page
    assert f"and all {len(found['variants'])} variants" in page
    assert f"nothing above a hint in {found['healthy']} healthy runs" in page


def test_what_a_transcript_costs():
    *_, last = (ROOT / "bench/results/transcript.txt").read_text(encoding="utf-8").splitlines()
    found, page = json.loads(last), text("docs/tokens.md")
    assert f"{found['ours']} s of CPU time for the whole episode" in page
    assert f"takes {found['baseline']:.1f} s on the same machine" in page


def test_how_much_faster_asynchronous_training_is():
    times = results("rollout")["learning"]["ours"]
    assert f"trains {times:.1f} times as fast at staleness 4" in text("README.md")


def test_what_algorithms_reach_on_the_calculator():
    found, page = results("algorithms"), text("docs/algorithms.md")
    rows = {"lora_grpo": "GRPO on adapters", "ppo": "PPO with a critic", "gspo": "GSPO (clip", "rloo": "RLOO with"}
    for name, title in rows.items():
        line = page[page.index(f"| {title}") :]
        assert f"| {found[name]['after']:.3f} |" in line[:120], name
