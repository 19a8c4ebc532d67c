"""An export in a real Chromium: from disk, without a network."""

import base64
import re
from collections.abc import Iterator

import pytest

from agentrl.view.bundle import single_file, write_folder
from tests.view.site import BOARD, HOSTILE, PNG, Site

pytest.importorskip("playwright")
from playwright.sync_api import expect

pytestmark = pytest.mark.browser
PIXEL = "data:image/png;base64," + base64.b64encode(PNG).decode()


def answers(site: Site) -> Iterator[tuple[str, object]]:
    run = "/api/runs/calc-seed0"
    paths = ["/api/runs", run, f"{run}/series", f"{run}/steps", f"{run}/steps/5", f"{run}/tools"]
    for name in ("step5/g1/e1", "step5/g1/e2", "hostile"):
        paths += [f"{run}/episodes/{name}?step=5", f"{run}/tokens/{name}?step=5"]
    for path in paths:
        yield path, site.answer(path)
    for name in ("step5/g1/e1", "step5/g1/e2"):
        yield f"/api/image/calc-seed0/{name}?step=5&message=1&part=1", PIXEL


@pytest.fixture(scope="module", params=["file", "folder"])
def export(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    site, renderers = Site(), {"/api/renderer/calc": BOARD}
    if request.param == "folder":
        write_folder(folder, answers(site), renderers=renderers, title="A run")
        return (folder / "index.html").as_uri()
    file = folder / "report.html"
    file.write_text("".join(single_file(answers(site), renderers=renderers, title="A run")), encoding="utf-8")
    return file.as_uri()


def test_an_export_opens_from_disk_without_a_network(page, context, export):
    asked = []
    context.set_offline(True)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(export)
    expect(page.locator("tbody tr")).to_have_count(4)
    expect(page.locator(".live")).to_have_text("export")
    page.get_by_role("link", name="calc-seed0", exact=True).click()
    expect(page.locator("figure.chart")).to_have_count(13)
    page.goto(f"{export}#/run/calc-seed0/step/5")
    expect(page.locator(".cell")).to_have_count(48)
    page.get_by_label("step5/g1/e1: reward").click()
    expect(page.locator(".tokens i.o1").first).to_be_visible()
    expect(page.frame_locator("iframe.env").locator("#board")).to_contain_text(
        "board of step5/g1/e1, message 8, alone"
    )
    expect(page.locator("img.picture")).to_have_js_property("naturalWidth", 1)
    page.goto(f"{export}#/run/calc-seed0/step/5/episode/step5/g1/e1?with=step5/g1/e2")
    expect(page.locator("#difference")).to_contain_text("90 tokens in common")
    page.goto(f"{export}#/run/calc-seed0/tools")
    expect(page.locator(".finding")).to_contain_text("web")
    assert [url for url in asked if not url.startswith(("file:", "data:", "about:"))] == []


def test_an_export_is_searched_in_the_page(page, export):
    page.goto(f"{export}#/search?q=Another+try")
    expect(page.locator(".hits li")).to_have_count(2)
    page.get_by_label("Text", exact=True).fill("^ev|pwned")
    expect(page.locator(".hits li")).to_have_count(0)
    page.get_by_label("regular expression").check()
    expect(page.locator(".hits li")).to_have_count(1)
    page.get_by_label("Text", exact=True).fill("(")  # no expression: nothing breaks
    expect(page.locator(".error")).to_be_visible()


def test_hostile_text_in_an_export_is_shown_and_never_run(page, export):
    page.goto(f"{export}#/run/calc-seed0/step/5/episode/hostile")
    expect(page.locator(".msg.user .tokens")).to_contain_text("</script><script>window.pwned=1</script>")
    assert page.evaluate("window.pwned") is None
    assert HOSTILE.startswith("<img")


def test_what_an_export_leaves_out_says_so(page, export):
    page.goto(f"{export}#/run/sqlite")
    expect(page.locator(".error")).to_have_text(re.compile("This export does not contain that page."))
