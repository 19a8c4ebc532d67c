"""The page on its real server, started by the command, over run folders written by the code of a run."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest

from agentrl.plural import plural
from agentrl.run_folder.records import EpisodeRecord, episodes_file
from agentrl.run_folder.tags import write_tags
from agentrl.types import CallRecord, Segment, ToolCall
from agentrl.view.export import Extent, export
from agentrl.view.library import Library, query_of
from tests.view.runs import episode, make_run, write_step
from tests.view.site import HOSTILE

pytest.importorskip("playwright")
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "runs"
    make_run(folder, "calc")
    make_run(folder, "other", seed=1)
    (folder / "calc/views").mkdir()
    (folder / "calc/views/env.js").write_text(
        "function render(e, at, place) { place.textContent = `drawn ${e.id} at ${at}, origin ${self.origin}`; }"
    )
    bad = episode("bad", text=HOSTILE.replace("\ud800", ""))
    write_step(
        folder / "calc", 2, [EpisodeRecord.of(2, 0, bad, 0.5), EpisodeRecord.of(2, 0, episode("good"), 0.5)]
    )
    return folder


@contextmanager
def viewing(runs: Path, home: Path, *options: str) -> Iterator[str]:
    """What `agentrl view` prints."""
    env = {**os.environ, "XDG_CACHE_HOME": str(home / "cache"), "XDG_CONFIG_HOME": str(home / "config")}
    command = [sys.executable, "-m", "agentrl", "view", str(runs), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as server:
        assert server.stdout is not None
        try:
            lines = []
            for line in server.stdout:
                lines.append(line)
                if found := re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", line):
                    yield found[0]
                    break
            else:
                raise AssertionError("".join(lines))
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def address(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What `agentrl view` prints."""
    with viewing(runs, tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture
def start(address: str) -> str:
    """The address without the token."""
    return address.partition("/?")[0]


def test_every_page_of_a_real_run(page, address, start):
    page.goto(address)
    expect(page.locator("tbody tr")).to_have_count(2)
    assert "token" not in page.url
    expect(page.locator("tbody tr").first).to_contain_text("25 % → 75 %")
    page.get_by_role("link", name="calc", exact=True).click()
    expect(page.locator("figure.chart").first).to_be_visible()
    expect(page.locator(".notes")).to_contain_text("step 2: no signal")
    page.goto(f"{start}/#/run/calc/step/3")
    expect(page.locator(".cell")).to_have_count(5)
    expect(page.locator(".cell").last).to_have_text("✕")
    page.locator(".cell").first.click()
    expect(page.locator(".msg")).to_have_count(6)  # the answer was tried twice
    expect(page.locator(".fork")).to_have_count(1)
    expect(page.locator("details.call")).to_contain_text('calculator(expression="1+2")')
    expect(page.locator("img.picture")).to_have_js_property("naturalWidth", 1)
    page.locator(".msg.assistant i.o1").first.hover()
    expect(page.get_by_role("tooltip")).to_contain_text("sampler logprob")
    expect(page.get_by_role("tooltip")).to_contain_text("−0.5")
    page.get_by_text("side by side").first.click()
    expect(page.locator("#difference")).to_contain_text("Both episodes have the same tokens.")
    page.goto(f"{start}/#/run/calc/tools")
    expect(page.locator(".finding")).to_contain_text("web")
    page.goto(f"{start}/#/search?q=1%2B2&run=calc")
    expect(page.locator(".hits li").first).to_be_visible()
    page.goto(f"{start}/#/compare?runs=calc,other")
    expect(page.locator("figure.chart").first).to_be_visible()
    expect(
        page.locator("section", has=page.get_by_role("heading", name="Configuration differences"))
    ).to_contain_text("seed")


def test_a_page_follows_the_files_and_shows_what_is_posted(page, address, start, runs):
    page.goto(address)
    page.goto(f"{start}/#/run/other")
    expect(page.locator(".facts")).to_contain_text("step 3")
    expect(page.locator(".live")).to_have_text("live")
    with (runs / "other" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "reward": 0.9}) + "\n")
    expect(page.locator(".facts")).to_contain_text("step 4")
    key = address.partition("token=")[2]
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    body = json.dumps({"hash": "#/run/calc/step/3/episode/s3/g0/e0?token=1"}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{start}/api/view", body, headers), timeout=30) as answer:
        assert answer.status == 200
    page.wait_for_url(re.compile("episode/s3/g0/e0"))
    expect(page.locator(".tokens i.at")).to_be_in_viewport()


def test_a_page_holds_no_connection_while_nothing_happens(page, address):
    page.goto(address)  # a browser has six of them for all its tabs
    with page.expect_request(re.compile(r"/api/events\?after=\d+&wait=0$")):
        expect(page.locator(".live")).to_have_text("live")


def test_a_page_hears_that_its_run_is_gone_and_that_another_was_killed(page, errors, tmp_path):
    runs = tmp_path / "runs"
    for name in ("gone", "killed"):
        make_run(runs, name)
    with viewing(runs, tmp_path) as address, subprocess.Popen(["cat"], stdin=subprocess.PIPE) as trainer:
        (runs / "killed/summary.json").unlink()
        (runs / "killed/.lock").write_text(f"process {trainer.pid} on {socket.gethostname()}\n")
        start = address.partition("?")[0]
        page.goto(address)
        row = page.locator("tbody tr", has_text="killed")
        expect(row).to_contain_text("running")
        trainer.kill()
        trainer.wait()  # its process id is free
        expect(row).to_contain_text("stopped")
        page.goto(f"{start}#/run/gone/step/3/episode/s3/g0/e0")
        expect(page.locator(".msg")).to_have_count(6)
        shutil.rmtree(runs / "gone")
        expect(page.locator("main > .error")).to_contain_text("There is no run 'gone'.")
        page.goto(f"{start}#/")
        expect(page.locator("tbody tr")).to_have_count(1)
    errors.clear()  # of the run that is gone


def test_the_tokens_shown_are_those_of_the_step_as_it_was_recorded_last(page, tmp_path):
    run = make_run(tmp_path / "runs", "resumed")
    with viewing(run, tmp_path) as address:
        page.goto(address)
        page.goto(f"{address.partition('?')[0]}#/run/resumed/step/3/episode/s3/g0/e0")
        texts = page.locator(".tokens")
        expect(texts).to_have_text(["Use the tool.", "&'(", ")*+,", "-.", "/0", "1"])
        again = episode("s3/g0/e0")
        again = replace(again, segments=(Segment((20, 21, 22, 23), "prompt", -1, 1), *again.segments[1:]))
        episodes_file(run, 3).unlink()
        write_step(run, 3, [EpisodeRecord.of(3, 0, again, 0.5)])
        expect(texts).to_have_text(["Use the tool.", "5678", ")*+,", "-.", "/0", "1"])


def test_a_page_whose_server_was_started_again_says_so_and_then_catches_up(page, context, errors, tmp_path):
    run = make_run(tmp_path / "runs", "calc")
    with viewing(run, tmp_path) as address:
        page.goto(address)
        page.goto(f"{address.partition('?')[0]}#/run/calc")
        expect(page.locator(".facts")).to_contain_text("step 3")
        port = str(urlsplit(address).port)
    expect(page.locator(".live")).to_have_text("not connected")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "reward": 0.9}) + "\n")
    with viewing(run, tmp_path, "--port", port) as address:
        told = page.get_by_role("alert").filter(has_text="Open the address that `agentrl view` printed.")
        expect(told).to_be_visible()  # next to what was being fetched when the server ended, if anything was
        context.new_page().goto(address)
        expect(page.locator(".live")).to_have_text("live")
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(page.locator(".facts")).to_contain_text("step 4")
    errors.clear()


def test_theme_and_filters_outlive_the_browser(page, browser, address, start):
    page.goto(address)
    page.get_by_role("button", name="auto").click()
    page.goto(f"{start}/#/search?q=1%2B2")
    page.once("dialog", lambda dialog: dialog.accept("sums"))
    with page.expect_response("**/api/preferences"):
        page.get_by_role("button", name="Save filter").click()
    fresh = browser.new_context()
    other = fresh.new_page()
    other.goto(address)
    expect(other.locator("html")).to_have_attribute("data-theme", "light")
    other.goto(f"{start}/#/search")
    expect(other.locator(".chip.saved")).to_contain_text("sums")
    fresh.close()


def test_hostile_text_of_a_record_is_shown_and_never_run(page, address, start):
    page.goto(address)
    page.goto(f"{start}/#/run/calc/step/2/episode/bad")
    expect(page.locator(".msg").first).to_be_visible()
    page.locator("summary", has_text="Task row").click()
    expect(page.locator(".config").first).to_contain_text("</script><script>window.pwned=1</script>")
    expect(page.locator(".config").first).to_contain_text("\\x1b[31mred\\x00\\u202eevil")
    page.goto(f"{start}/#/search?q=onerror")
    expect(page.locator(".hits li")).to_have_count(1)
    expect(page.locator(".snippet")).to_contain_text("<img src=x")
    assert page.evaluate("window.pwned") is None


OTHER = """<!doctype html><title>other</title><p id=said></p><script>
(async () => {
  const target = location.hash.slice(1), got = [];
  const tries = {
    fetch: () => fetch(target + "/api/runs", { credentials: "include" }).then((r) => r.text()),
    script: () => new Promise((yes, no) => { const s = document.createElement("script");
      s.src = target + "/page.js"; s.onload = yes; s.onerror = no; document.head.append(s); }),
    post: () => fetch(target + "/api/view", { method: "POST", credentials: "include", body: '{"hash": "#/"}' })
      .then((r) => r.text()),
    frame: () => new Promise((yes, no) => { const f = document.createElement("iframe"); f.src = target + "/";
      f.onload = () => { try { yes(f.contentDocument.body.textContent); } catch (e) { no(e); } };
      document.body.append(f); setTimeout(no, 3000); }).then((text) => { if (!text) throw new Error("empty"); }),
  };
  for (const [name, attempt] of Object.entries(tries)) {
    await attempt().then(() => got.push(name + ": read"), () => got.push(name + ": refused"));
  }
  document.getElementById("said").textContent = got.join(", ");
})();
</script>"""


class _Other(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(OTHER.encode())

    def log_message(self, *args: object) -> None:
        pass


def test_a_page_of_another_origin_cannot_read_it(page, address, start, errors):
    page.goto(address)  # the cookie is there
    expect(page.locator("tbody tr")).to_have_count(2)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Other)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        for host in ("127.0.0.1", "localhost"):
            page.goto("about:blank")
            page.goto(f"http://{host}:{server.server_port}/#{start}")
            said = page.locator("#said")
            expect(said).to_have_text("fetch: refused, script: refused, post: refused, frame: refused")
        port = urlsplit(start).port
        page.goto(f"http://localhost:{port}/")  # another name of this server has no cookie
        expect(page.locator("body")).to_contain_text("The token is missing or wrong.")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    errors.clear()


@pytest.mark.parametrize("target", ["report.html", "report"])
def test_the_command_exports_what_opens_from_disk(page, context, runs, tmp_path, target):
    file = tmp_path / target
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", "view", str(runs / "calc"), "--export", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    context.set_offline(True)
    place = (file if file.is_file() else file / "index.html").as_uri()
    page.goto(place)
    expect(page.locator("tbody tr")).to_have_count(1)
    page.goto(f"{place}#/run/calc/step/3/episode/s3/g0/e0")
    expect(page.locator(".tokens i.o1").first).to_be_visible()
    expect(page.locator("img.picture")).to_have_js_property("naturalWidth", 1)
    page.goto(f"{place}#/run/calc")
    expect(page.locator("figure.chart").first).to_be_visible()
    page.goto(f"{place}#/run/calc/step/2/episode/bad")
    page.locator("summary", has_text="Task row").click()
    expect(page.locator(".config").first).to_contain_text("</script>")
    assert page.evaluate("window.pwned") is None


def test_the_view_of_an_env_is_drawn_in_its_frame_and_reaches_nothing(page, address, start):
    page.goto(address)
    page.goto(f"{start}/#/run/calc/step/3/episode/s3/g1/e2")
    frame = page.frame_locator("iframe.env")
    expect(frame.locator("#view")).to_contain_text("drawn s3/g1/e2 at 4")
    page.locator(".slider input").fill("1")
    expect(frame.locator("#view")).to_contain_text("drawn s3/g1/e2 at 1")
    expect(frame.locator("#view")).to_contain_text("origin null")


def test_an_address_that_the_page_had_before_is_shown_again(page, address, start):
    page.goto(address)
    page.goto(f"{start}/#/search?q=1%2B2")
    text = page.get_by_label("Text", exact=True)
    expect(text).to_have_value("1+2")
    text.fill("calculator")
    page.wait_for_url(re.compile("q=calculator$"))
    page.evaluate("location.hash = '#/search?q=1%2B2'")  # a kept filter
    expect(text).to_have_value("1+2")
    page.goto(f"{start}/#/run/calc/step/3/episode/s3/g0/e0")
    expect(page.locator(".msg")).to_have_count(6)
    page.evaluate("location.hash += '?token=8'")
    expect(page.locator("aside .token-card")).to_be_visible()


def test_what_was_looked_for_is_there_after_going_back(page, address, start):
    page.goto(address)
    page.get_by_label("Filter runs").fill("calc")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_role("link", name="calc", exact=True).click()
    page.get_by_label("Find a series").fill("held")
    expect(page.locator("figure.chart")).to_have_count(2)
    page.get_by_role("link", name="Tools").click()
    expect(page.locator(".finding")).to_contain_text("web")
    page.go_back()
    expect(page.locator("figure.chart")).to_have_count(2)
    page.go_back()
    expect(page.locator("tbody tr")).to_have_count(1)


def test_only_steps_with_episodes_are_links(page, address, start):
    page.goto(address)
    page.goto(f"{start}/#/run/calc")
    expect(page.locator(".notes li").first).to_contain_text("created")
    expect(page.locator(".notes li", has_text="created").locator("a")).to_have_count(0)
    expect(page.locator(".notes li", has_text="no signal").locator("a")).to_have_attribute(
        "href", "#/run/calc/step/2"
    )


def test_the_frame_of_an_env_is_as_dark_as_the_page(browser, address, start):
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    page.goto(address)
    page.goto(f"{start}/#/run/calc/step/3/episode/s3/g0/e0")
    frame = page.locator("iframe.env")
    expect(frame).to_be_visible()
    page.evaluate("delete document.documentElement.dataset.theme")  # what another test chose
    text = page.frame_locator("iframe.env").locator("body").evaluate("(e) => getComputedStyle(e).color")
    assert text != frame.evaluate("(e) => getComputedStyle(e).backgroundColor")
    context.close()


def test_an_export_is_searched_as_the_server_searches(page, address, start, runs, tmp_path):
    folder = tmp_path / "runs"
    run = make_run(folder, "tagged", steps=1)
    make_run(folder, "other", steps=1)
    write_tags(run, ["wanted"])
    two = episode("two", 0.0)
    ok = CallRecord(ToolCall("c1", "web", {}), "found", "ok", 0.1)
    two = replace(two, turns=(replace(two.turns[0], calls=(*two.turns[0].calls, ok)), *two.turns[1:]))
    write_step(run, 1, [EpisodeRecord.of(1, 0, two, 0.5), EpisodeRecord.of(1, 0, episode("lost", None), None)])
    library = Library([folder], index=tmp_path / "index.sqlite")
    export(library, tmp_path / "report.html", Extent())
    for query in ("tag=wanted", "reward_min=0", "tool=web&outcome=tool_exception", "tool=web&outcome=ok"):
        page.goto(f"{(tmp_path / 'report.html').as_uri()}#/search?{query}")
        wanted = library.search(query_of(dict(parse_qsl(query)), library))["total"]
        expect(page.locator("main p[role=status]")).to_contain_text(f"{plural(wanted, 'episode')}, ")


def test_a_narrow_window_shows_a_whole_episode(page, address, start):
    page.goto(address)
    page.set_viewport_size({"width": 340, "height": 700})
    page.goto(f"{start}/#/run/calc/step/3/episode/s3/g0/e0")
    expect(page.locator(".msg")).to_have_count(6)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("place", ["#/", "#/run/calc", "#/run/calc/step/3", "#/compare?runs=calc,other"])
def test_nothing_is_wider_than_a_window_of_320_pixels(page, address, start, place):
    page.set_viewport_size({"width": 320, "height": 600})
    page.goto(address)
    page.goto(f"{start}/{place}")
    expect(page.locator("main").locator("tbody tr, figure.chart, .cell").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_focus_stays_in_the_list_of_keys_and_returns_from_it(page, address):
    page.goto(address)
    link = page.get_by_role("link", name="other", exact=True)
    link.focus()
    page.keyboard.press("?")
    expect(page.locator(".help button")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("!document.activeElement.closest('main, header')")
    page.keyboard.press("Escape")
    expect(link).to_be_focused()


def test_colors_that_say_something_are_kept_where_the_system_chooses_the_others(browser, address, start):
    context = browser.new_context(forced_colors="active")
    page = context.new_page()
    page.goto(address)
    page.goto(f"{start}/#/run/calc/step/3")
    cells = page.locator(".matrix .row").first.locator(".cell")
    expect(cells).to_have_count(2)
    best, worst = (cells.nth(n).evaluate("(e) => getComputedStyle(e).backgroundColor") for n in range(2))
    assert best != worst
    painted = "(e) => new Set(new Uint32Array(e.getContext('2d').getImageData(0, 0, e.width, 1).data.buffer)).size"
    assert page.locator(".lanes canvas").evaluate(painted) > 2  # engine, tool and env
    context.close()
