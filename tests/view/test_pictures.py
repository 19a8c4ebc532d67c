"""The pictures of docs/view.md: `AGENTRL_PICTURES=docs/pictures pytest tests/view/test_pictures.py` makes them."""

import os
from pathlib import Path

import pytest

pytest.importorskip("playwright")
from playwright.sync_api import expect

pytestmark = pytest.mark.browser

RUN = "#/run/calc-seed0"
PICTURES = {
    "view-run": (RUN, "figure.chart canvas"),
    "view-step": (f"{RUN}/step/5", ".cell"),
    "view-episode": (f"{RUN}/step/5/episode/step5/g1/e1?color=advantage", ".tokens i"),
    "view-compare": ("#/compare?runs=calc-seed0,calc-seed1,sqlite", "figure.chart canvas"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_small(name, page, url, tmp_path):
    folder = Path(os.environ.get("AGENTRL_PICTURES") or tmp_path)
    address, ready = PICTURES[name]
    page.set_viewport_size({"width": 1120, "height": 640})
    page.goto("about:blank")
    page.goto(f"{url}/{address}")
    expect(page.locator(ready).first).to_be_visible()
    expect(page.locator(".live")).to_have_text("live")
    if name == "view-episode":
        page.locator(".msg.assistant i").nth(12).hover()
        expect(page.get_by_role("tooltip")).to_be_visible()
    file = folder / f"{name}.png"
    page.screenshot(path=file)
    assert 10_000 < file.stat().st_size < 150_000
