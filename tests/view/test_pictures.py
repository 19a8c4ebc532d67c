"""The pictures of docs/view.md: `AGENTRL_PICTURES=docs/pictures pytest tests/view/test_pictures.py` makes them."""

import os
import re
from io import BytesIO
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
RUN = "#/run/calc-seed0"
PICTURES = {
    "view-run": (RUN, "figure.chart canvas"),
    "view-step": (f"{RUN}/step/5", ".cell"),
    "view-episode": (f"{RUN}/step/5/episode/step5/g1/e1?color=advantage", ".tokens i"),
    "view-compare": ("#/compare?runs=calc-seed0,calc-seed1,sqlite", "figure.chart canvas"),
}
COLORS = 128
MOST = 75_000
"""Bytes of a picture; all together have at most 300 kB."""


@pytest.mark.browser
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_small(name, page, url, tmp_path):
    from PIL import Image
    from playwright.sync_api import expect

    folder = Path(os.environ.get("AGENTRL_PICTURES") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
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
    with Image.open(BytesIO(page.screenshot())) as shot:
        few = shot.convert("RGB").quantize(COLORS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        few.save(file, optimize=True)
    assert 10_000 < file.stat().st_size < MOST


def test_the_page_shows_all_pictures_and_they_are_small():
    shown = re.findall(r"!\[[^]]+\]\(pictures/([^)]+)\.png\)", (DOCS / "view.md").read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(PICTURES)
    assert all((DOCS / f"pictures/{name}.png").stat().st_size < MOST for name in PICTURES)
