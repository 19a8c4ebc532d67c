"""Every page in a real Chromium, over made-up runs that show every state."""

import json
import re
import subprocess
import sys
import threading

import pytest

from tests.view.site import EXTRA, HOSTILE, PNG, SERIES, STEPS, Site

pytest.importorskip("playwright")
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

RUN = "calc-seed0"
EPISODE = f"#/run/{RUN}/step/5/episode/step5/g1/e1"


def shown(page: Page, url: str, address: str) -> None:
    page.goto("about:blank")
    page.goto(f"{url}/{address}")


def test_runs_are_searched_sorted_and_picked_for_a_comparison(page, url):
    shown(page, url, "#/")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(4)
    expect(rows.first).to_contain_text("12 % → 62 %")
    expect(rows.first).to_contain_text("1.5 h")
    expect(rows.first.locator(".tag")).to_have_text("calculator")
    for heading in page.locator("th").filter(has=page.locator("button")).all():
        if heading.inner_text():
            expect(heading).to_have_attribute("title", re.compile(r"\w.*\."))
    expect(rows.nth(1)).to_contain_text("forked from calc-seed0@200, weights only")
    page.get_by_role("button", name="running").click()
    expect(rows).to_have_count(1)
    page.get_by_role("button", name="all", exact=True).click()
    page.get_by_label("Filter runs").fill("wip")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("sqlite")
    page.get_by_label("Filter runs").fill("seed")
    expect(rows).to_have_count(2)
    page.get_by_role("button", name="Held out").click()
    expect(rows.first).to_contain_text("calc-seed0")
    page.get_by_role("button", name="Held out").click()
    expect(rows.first).to_contain_text("calc-seed1")
    for box in page.get_by_role("checkbox").all():
        box.check()
    page.get_by_role("link", name="Compare 2").click()
    expect(page.get_by_role("heading", name="Compare")).to_be_visible()


def test_the_curves_that_matter_are_drawn_and_a_click_opens_a_step(page, url):
    shown(page, url, f"#/run/{RUN}")
    charts = page.locator("figure.chart")
    expect(charts).to_have_count(len(SERIES))
    expect(page.locator("figure.chart canvas")).to_have_count(len(SERIES))
    expect(page.locator(".findings")).to_contain_text("Most groups carry no signal.")
    expect(page.locator(".notes li")).to_have_count(4)
    expect(charts.first.get_by_role("img")).to_have_attribute(
        "aria-label", re.compile(r"reward: .* steps 1 to 300")
    )
    plot = charts.first.locator(".u-over")
    box = plot.bounding_box()
    plot.hover(position={"x": box["width"] / 2, "y": 40})
    expect(charts.first.locator(".tip")).to_have_text(re.compile(r"step 15\d: "))
    plot.click(position={"x": box["width"] / 2, "y": 40})
    page.wait_for_url(re.compile(rf"#/run/{RUN}/step/15\d$"))


def test_a_fork_links_to_the_step_that_it_came_from(page, url):
    shown(page, url, "#/run/calc-seed1")
    expect(page.locator(".facts")).to_contain_text("forked from calc-seed0@200, weights only")
    page.get_by_role("link", name="calc-seed0@200").click()
    page.wait_for_url(re.compile("#/run/calc-seed0/step/200$"))


def test_other_series_are_found_by_search_and_read_as_a_table(page, url):
    shown(page, url, f"#/run/{RUN}")
    page.get_by_label("Find a series").fill("extra/1")
    expect(page.locator("figure.chart")).to_have_count(len([n for n in EXTRA if "extra/1" in n]))
    page.get_by_label("Find a series").fill("^kl$")
    expect(page.locator("figure.chart")).to_have_count(1)
    page.get_by_role("button", name="Table").click()
    expect(page.locator("caption")).to_have_text("Values by step")
    expect(page.locator("tbody tr").first.locator("td").first).to_have_text(str(STEPS))


def test_a_step_is_a_matrix_with_glyphs_lanes_and_bins_that_filter(page, url):
    shown(page, url, f"#/run/{RUN}/step/5")
    cells = page.locator(".matrix .cell")
    expect(cells).to_have_count(48)
    assert cells.nth(3).inner_text() == "✕"
    assert cells.nth(3).get_attribute("class").startswith("cell r-none")
    expect(page.get_by_label("step5/g1/e2: reward")).to_have_text("✂")
    expect(page.get_by_label("step5/g4/e4: reward")).to_have_text("◷")
    expect(page.get_by_label("step5/g2/e0: reward")).to_have_text("·")
    assert cells.nth(16).get_attribute("class") == "cell r8"
    expect(page.locator(".pole")).to_contain_text("Longest phase: generate")
    expect(page.locator(".pole")).to_contain_text("Longest pole: step5/g4/e1")
    expect(page.locator(".pole")).to_contain_text("in tools")
    ranks = page.locator(".panel.wide tbody tr")
    expect(ranks).to_have_text([re.compile(r"rank 0.*500 ms.*900"), re.compile(r"rank 1.*1.5 s.*900")])
    bars = [rank.locator("rect").bounding_box() for rank in ranks.all()]
    assert bars[0]["x"] == pytest.approx(bars[1]["x"], abs=1)
    assert bars[1]["width"] > 2 * bars[0]["width"] > 0
    page.get_by_role("button", name=re.compile("episodes with rewards from 0.95")).click()
    expect(page.locator("tbody tr td").filter(has_text="step5/").first).to_be_visible()
    wins = page.locator("tbody tr").filter(has=page.locator(".pill", has_text=re.compile("^1$")))
    assert wins.count() == page.locator("main > .scroll tbody tr").count() > 8
    dim = 48 - wins.count()
    expect(page.locator(".cell.dim")).to_have_count(dim)
    assert "bin=19" in page.url
    page.reload()  # the filter is in the address
    expect(page.locator(".cell.dim")).to_have_count(dim)
    page.get_by_role("button", name="clear").click()
    expect(page.locator(".cell.dim")).to_have_count(0)
    expect(page.get_by_role("button", name=re.compile("stale 1"))).to_have_attribute(
        "title", re.compile("older weights")
    )
    page.get_by_text("Metrics of this step").click()
    expect(page.locator("dt", has_text="kl")).to_have_attribute("title", "Mean KL estimate.")
    page.get_by_role("button", name=re.compile("stale 1")).click()
    expect(page.locator("main > .scroll tbody tr")).to_have_count(1)


def test_arrows_move_in_the_matrix_and_enter_opens(page, url):
    shown(page, url, f"#/run/{RUN}/step/5")
    page.locator(".cell").first.focus()
    for key in ("ArrowDown", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url(re.compile("episode/step5/g1/e1$"))


def test_the_conversation_is_its_tokens(page, url, site):
    shown(page, url, EPISODE)
    expect(page.locator(".msg")).to_have_count(9)
    expect(page.locator(".tokens i").first).to_be_visible()
    pieces = page.locator(".text .tokens").all_inner_texts()
    assert "".join("".join(pieces).split()) == "".join(site.text("step5/g1/e1").split())
    roles = page.locator(".msg .role").all_inner_texts()
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "user", "assistant", "assistant"]
    token = page.locator(".msg.assistant .tokens i.o1").first
    token.hover()
    card = page.get_by_role("tooltip")
    values = dict(zip(card.locator("dt").all_inner_texts(), card.locator("dd").all_inner_texts(), strict=True))
    k = int(values["position"])
    expected = {
        name: column[0] for name, column in site.tokens("step5/g1/e1", k, 1).items() if isinstance(column, list)
    }
    said = {name: float(text.replace("−", "-")) for name, text in values.items() if name not in ("origin", "loss")}
    assert values["origin"] == "sampled"
    assert said["id"] == expected["ids"]
    assert said["sampler logprob"] == expected["logprob"]
    assert said["learner logprob"] == expected["learner_logprob"]
    assert said["reference logprob"] == expected["ref_logprob"]
    assert said["ratio"] == expected["ratio"]
    assert said["entropy"] == pytest.approx(expected["entropy"], abs=1e-3)
    assert said["reference KL"] == pytest.approx(0.007, abs=1e-3)  # exp(d) - d - 1 for d = -0.125
    assert said["advantage"] == pytest.approx(expected["advantage"])
    assert said["version"] == expected["version"]


def test_tokens_are_colored_by_any_value_and_only_trained_ones_count(page, url, site):
    shown(page, url, EPISODE)
    select = page.get_by_label("Color by")
    tokens = site.tokens("step5/g1/e1", 0, 10**9)
    trained = [k for k, a in enumerate(tokens["advantage"]) if a is not None]
    sampled = tokens["origin"].count(1)
    for name in select.locator("option").all():
        select.select_option(name.get_attribute("value"))
        expect(page.locator(".legend")).to_contain_text(f"{len(trained)} of {sampled} sampled tokens train")
    select.select_option("advantage")
    mean = sum(tokens["advantage"][k] for k in trained) / len(trained)
    expect(page.locator(".legend")).to_contain_text(f"mean {mean:.3g}".replace("-", "−"))
    expect(page.locator(".legend")).to_contain_text("How much better than expected")
    drawn = "n => new Set([...document.querySelectorAll('.text i')].map((i) => i.k)).size >= n"
    page.wait_for_function(drawn, arg=len(tokens["ids"]))  # long texts are drawn in parts
    counts = page.evaluate("[...document.querySelectorAll('.text i')].map((i) => [i.k, i.className])")
    grey = {k for k, name in counts if "un" in name.split()}
    assert grey == set(range(len(tokens["ids"]))) - set(trained)
    assert "color=advantage" in page.url
    page.keyboard.press("Escape")
    page.locator(".crumbs h1").click()
    page.keyboard.press("c")
    expect(select).to_have_value("logprob")


def test_a_link_leads_to_a_token(page, url, site):
    shown(page, url, f"#/run/{RUN}/step/5/episode/long?token=15000")
    marked = page.locator(".tokens i.at")
    expect(marked).to_be_in_viewport()
    assert marked.evaluate("(i) => i.k") == 15_000
    expect(page.locator("aside .token-card dd").first).to_have_text("15,000")
    page.keyboard.press("ArrowRight")
    expect(page.locator("aside .token-card dd").first).to_have_text("15,001")
    assert "token=15001" in page.url
    # far from the screen tokens are plain text, not elements
    assert page.locator(".tokens i").count() < 12_000


def test_tool_calls_fold_with_arguments_result_outcome_and_time(page, url):
    shown(page, url, EPISODE)
    call = page.locator("details.call").first
    expect(call).to_contain_text('calculator(expression="1+2")')
    expect(call).to_contain_text("tool_error")
    expect(call).to_contain_text("12 ms")
    expect(call.locator("pre")).to_have_count(0)
    call.locator("summary").click()
    expect(call).to_contain_text('"expression": "1+2"')
    expect(call).to_contain_text("division by zero")
    tool = page.locator(".msg.tool").first
    expect(tool.locator(".tokens")).to_be_visible()
    page.keyboard.press("f")
    expect(tool.locator(".tokens")).to_have_count(0)
    page.keyboard.press("f")
    expect(tool.locator(".tokens")).to_be_visible()


def test_rewards_fall_by_name_and_turn_and_branches_say_why(page, url):
    shown(page, url, EPISODE)
    rows = page.locator(".waterfall").first.locator("tr")
    expect(rows).to_have_count(4)
    assert [re.sub(r"\s+", " ", text).strip() for text in rows.all_inner_texts()] == [
        "solved +1",
        "cost turn 1 −0.03",
        "cost turn 2 −0.07",
        "total 0.9",
    ]
    expect(page.locator(".waterfall").nth(1)).to_contain_text("advantage turn 1")
    expect(page.get_by_role("tree")).to_contain_text("the template rewrote message 2")
    expect(page.locator(".fork")).to_have_text("↳ fork: the template rewrote message 2")
    page.locator(".tree button", has_text="fork").click()
    expect(page.locator(".msg").last).to_be_in_viewport()


def test_siblings_stand_side_by_side_at_their_first_difference(page, url, site):
    shown(page, url, EPISODE)
    expect(page.locator(".siblings li")).to_have_count(8)
    page.locator(".siblings li", has_text="step5/g1/e4").get_by_text("side by side").click()
    expect(page.locator("#difference")).to_contain_text("90 tokens in common")
    left, right = page.locator(".sides section").all()
    for side, name in ((left, "step5/g1/e1"), (right, "step5/g1/e4")):
        expect(side.locator("i.at")).to_have_text(site.tokens(name, 90, 1)["pieces"][0].rstrip())
    tops = [side.locator("i.at").bounding_box()["y"] for side in (left, right)]
    assert tops[0] == tops[1]
    page.keyboard.press("u")
    page.wait_for_url(re.compile("step/5$"))


def test_brackets_walk_through_siblings_and_steps(page, url):
    shown(page, url, EPISODE)
    expect(page.locator(".siblings li")).to_have_count(8)
    page.keyboard.press("]")
    page.wait_for_url(re.compile("episode/step5/g1/e2$"))
    shown(page, url, f"#/run/{RUN}/step/5")
    expect(page.locator(".cell")).to_have_count(48)
    expect(page.locator("a[rel=next]")).to_have_attribute("href", re.compile("step/6$"))
    page.keyboard.press("]")
    page.wait_for_url(re.compile("step/6$"))


def test_images_are_shown_and_an_env_draws_in_a_frame_of_no_origin(page, url):
    shown(page, url, EPISODE)
    picture = page.locator("img.picture")
    expect(picture).to_have_attribute("alt", f"image/png, {len(PNG)} B")
    expect(picture).to_have_js_property("naturalWidth", 1)
    board = page.frame_locator("iframe.env").locator("#board")
    expect(board).to_contain_text("board of step5/g1/e1, message 8, alone")


def test_an_episode_is_copied_as_json_messages_and_a_test_that_runs(page, url, context, tmp_path):
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    shown(page, url, EPISODE)
    expect(page.locator(".msg")).to_have_count(9)

    def copied(what: str) -> str:
        page.get_by_role("button", name=what, exact=True).click()
        expect(page.locator(".toast")).to_be_visible()
        return page.evaluate("navigator.clipboard.readText()")

    assert json.loads(copied("JSON"))["id"] == "step5/g1/e1"
    messages = json.loads(copied("Messages"))
    assert messages[2]["tool_calls"][0]["function"] == {"name": "calculator", "arguments": '{"expression":"1+2"}'}
    test = copied("Test")
    compile(test, "copied", "exec")
    assert "from agentrl.envs.calculator import Calculator\n" in test


@pytest.mark.parametrize(
    ("stop", "num_turns", "reward"),
    [("answered", 2, 1.0), ("max_turns", 1, 0.0), ("max_tokens", 2, 1.0), ("infra", 1, None)],
)
def test_a_copied_test_replays_the_episode(page, url, tmp_path, stop, num_turns, reward):
    shown(page, url, "#/")
    call = {"id": "c", "name": "calculator", "arguments": {"expression": "1+2"}}
    episode = {
        "id": "a/1",
        "step": 1,
        "task": "t",
        "row": {"start": 1, "operations": [["+", 2]]},
        "stop_reason": stop,
        "rewards": {"total": reward},
        "turns": [{"message": 1}, {"message": 3}][:num_turns],
        "messages": [
            {"role": "user", "content": "1+2?"},
            {"role": "assistant", "content": 'caf\u00e9 \u202e \U0001f600 \n"""', "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "c"},
            {"role": "assistant", "content": "3"},
        ],
    }
    source = page.evaluate(
        "async (e) => (await import('/text.js')).scriptedTest(e, 'agentrl.envs.calculator:Calculator')", episode
    )
    file = tmp_path / "test_copied.py"
    file.write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "1 passed" in done.stdout, f"{source}\n{done.stdout}"


def test_tools_show_outcomes_times_failures_and_what_is_never_called(page, url):
    shown(page, url, f"#/run/{RUN}/tools")
    expect(page.locator(".finding")).to_have_text("Offered but never called: web.")
    row = page.locator("tbody tr").first
    expect(row).to_contain_text("87.7 %")
    expect(row).to_contain_text("tool_error 112")
    expect(row).to_contain_text("40 ms")
    page.get_by_role("link", name="example").click()
    page.wait_for_url(re.compile("episode/step5/g1/e1$"))


def test_search_finds_pages_marks_and_keeps_filters(page, url, site):
    shown(page, url, "#/search?q=sum&tool=calculator")
    expect(page.locator(".hits li")).to_have_count(50)
    expect(page.locator("mark").first).to_have_text("sum")
    expect(page.locator(".snippet").first).to_contain_text("<b>sum</b>")  # text, not markup
    page.get_by_role("button", name=re.compile("Show more")).click()
    expect(page.locator(".hits li")).to_have_count(120)
    page.get_by_label("stopped").select_option("max_turns")
    expect(page.locator(".hits li").first).to_contain_text("max_turns")
    assert any("stop=max_turns" in path and "tool=calculator" in path for path in site.asked)
    page.on("dialog", lambda dialog: dialog.accept("cut ones"))
    page.get_by_role("button", name="Save filter").click()
    page.get_by_label("Text", exact=True).fill("other")
    page.wait_for_url(re.compile("q=other"))
    page.reload()
    page.get_by_role("link", name="cut ones").click()
    expect(page.get_by_label("Text", exact=True)).to_have_value("sum")
    expect(page.get_by_label("stopped")).to_have_value("max_turns")
    page.get_by_label("Delete filter cut ones").click()
    expect(page.get_by_role("link", name="cut ones")).to_have_count(0)


def test_more_hits_stay_when_asked_for_at_once(page, url):
    # the pause after the last key is stretched, so that the click always comes before its end
    page.add_init_script(
        "const real = setTimeout; window.setTimeout = (f, ms, ...rest) => real(f, ms === 150 ? 1500 : ms, ...rest)"
    )
    shown(page, url, "#/search?q=sum&tool=calculator")
    page.get_by_role("button", name=re.compile("Show more")).click()
    expect(page.locator(".hits li")).to_have_count(120)
    page.wait_for_timeout(2000)
    expect(page.locator(".hits li")).to_have_count(120)


def test_runs_are_compared_with_bands_over_seeds(page, url):
    shown(page, url, "#/compare?runs=sqlite,calc-seed0,calc-seed1")
    expect(page.get_by_text("Tasks: before is")).to_have_text("Tasks: before is sqlite, after is calc-seed1.")
    shown(page, url, "#/compare?runs=calc-seed0,calc-seed1,sqlite")
    expect(page.locator("figure.chart")).to_have_count(len(SERIES))
    expect(page.locator("figure.chart").first).to_have_attribute("data-series", SERIES[0][0])
    names = page.locator("main > .legend span")
    expect(names).to_have_count(2)  # two seeds of one experiment, and another
    expect(names.first).to_have_text("calc-seed0 ×2")
    page.get_by_label("bands over seeds").uncheck()
    expect(names).to_have_count(3)
    regressions = page.locator("section", has=page.get_by_role("heading", name="Regressions"))
    expect(regressions.locator("tbody tr")).to_have_count(2)
    expect(regressions.locator("tbody tr").first).to_contain_text("−0.2")
    differences = page.locator("section", has=page.get_by_role("heading", name="Configuration differences"))
    expect(differences.locator("tbody tr")).to_have_count(2)


def test_keys_are_listed_and_work(page, url):
    shown(page, url, "#/")
    expect(page.locator("tbody tr")).to_have_count(4)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("one level up")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("#/run/calc-seed1$"))
    expect(page.locator("figure.chart")).to_have_count(len(SERIES))
    page.keyboard.press("/")
    page.keyboard.type("gk?")  # typed into the field, no command
    expect(page.get_by_label("Find a series")).to_have_value("gk?")
    page.keyboard.press("Escape")
    page.keyboard.press("s")
    page.wait_for_url(re.compile(r"#/search\?run=calc-seed1"))
    page.keyboard.press("g")
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()


def test_light_and_dark(page, url):
    page.emulate_media(color_scheme="dark")
    shown(page, url, "#/")
    dark = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    page.emulate_media(color_scheme="light")
    light = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    page.keyboard.press("t")  # light
    page.keyboard.press("t")  # dark, whatever the system says
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == dark != light
    page.reload()
    expect(page.get_by_role("button", name="dark")).to_be_visible()
    page.emulate_media(media="print")  # paper is white
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == light


def test_a_page_follows_its_run_and_shows_what_a_program_asks(page, url, site):
    shown(page, url, "#/run/sqlite")
    expect(page.locator(".live")).to_have_text("live")
    expect(page.locator(".facts")).to_contain_text("step 120")
    next(run for run in site.runs if run["id"] == "sqlite")["step"] = 121
    site.tell({"changed": ["sqlite"]})
    expect(page.locator(".facts")).to_contain_text("step 121")
    expect(page.locator("figure.chart").first.get_by_role("img")).to_have_attribute(
        "aria-label", re.compile("to 121$")
    )
    site.tell({"hash": "javascript:alert(1)"})
    site.tell({"hash": "https://example.org/"})
    site.tell({"hash": EPISODE})
    page.wait_for_url(re.compile("episode/step5/g1/e1$"))
    expect(page.locator(".msg")).to_have_count(9)


def test_an_unknown_address_and_a_missing_run_say_so(page, url, errors):
    shown(page, url, "#/nowhere")
    expect(page.locator(".error")).to_contain_text("Nothing is shown at this address.")
    shown(page, url, "#/run/calc-seed0/step/5/episode/%E0%A4%A")  # broken escape
    expect(page.locator(".msg")).to_have_count(9)
    expect(page.locator(".crumbs h1")).to_have_text("%E0%A4%A")
    shown(page, url, "#/run/none")
    expect(page.locator(".error")).to_have_text("nothing at /api/runs/noneLook at the list of runs.")
    assert [text for text in errors if "404" not in text] == []
    errors.clear()


def test_hostile_text_is_shown_and_never_run(page, url, site):
    site.long_message = HOSTILE + "A long line. " * 800_000 + "\nits end"  # 10 MB
    shown(page, url, f"#/run/{RUN}/step/5/episode/hostile")
    expect(page.locator(".msg")).to_have_count(2)
    text = page.locator(".msg.user .tokens").inner_text()
    assert "<img src=x onerror=" in text
    assert "\\x1b[31mred\\x00\\u202eevil\\u200b\\u009b" in text
    assert "\\ud800" in text
    assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert page.evaluate("window.pwned") is None
    tool = page.locator(".msg.tool .tokens")
    assert tool.evaluate("(box) => box.textContent.length") > 10_000_000
    assert tool.evaluate("(box) => box.textContent.endsWith('its end')")
    tool.locator(".chunk").last.scroll_into_view_if_needed()
    expect(page.locator(".error")).to_contain_text("Fault in bonus")
    site.long_message = "x"


def test_functions_of_the_page_agree_with_values_by_hand(page, url):
    shown(page, url, "#/")
    got = page.evaluate(
        """async () => {
            const [chart, step, panels, compare, ui] = await Promise.all(
                ['chart', 'step', 'panels', 'compare', 'ui'].map((name) => import(`/${name}.js`)));
            return {
                ticks: [chart.ticks([0, 0.5, null]), chart.ticks([5.8302, 5.8304, 5.8306])],
                smooth: chart.smooth([1, null, 3], 0.5), raw: chart.smooth([1, null, 3], 0),
                bins: step.bins([0, 0, 0.5, 1, null], [0, 1]).map((b) => b.count).filter(Boolean),
                same: step.bins([2, 2], [2, 2]).map((b) => b.count),
                pole: step.longestPole({phases: [], episodes: [
                    {episode: 'a', kind: 'tool', start_s: 0, end_s: 2},
                    {episode: 'b', kind: 'engine', start_s: 0, end_s: 3}]}).last,
                rest: panels.steps({total: 1, parts: [{name: 'a', turn: null, value: 0.25, weight: 2}]})
                    .map((s) => [s.name, s.from, s.to]),
                band: compare.band([{steps: [1, 2], values: [1, 2]}, {steps: [2], values: [4]}], [1, 2]),
                shade: [ui.shade(0, 0, 1), ui.shade(1, 0, 1), ui.shade(null, 0, 1), ui.shade(1, 1, 1)],
                num: [ui.num(null), ui.num(-0.5), ui.num(1234), ui.num(1e-9), ui.num(NaN), ui.num(-Infinity)],
            };
        }"""
    )
    assert got["ticks"] == [["0", "0.5", ""], ["5.8302", "5.8304", "5.8306"]]
    assert got["smooth"] == [1, None, pytest.approx((0.25 * 1 + 0.5 * 3) / 0.75)]
    assert got["raw"] == [1, None, 3]
    assert got["bins"] == [2, 1, 1]
    assert got["same"] == [2]
    assert (got["pole"]["episode"], got["pole"]["kind"]) == ("b", "engine")
    assert got["rest"] == [["a", 0, 0.5], ["other", 0.5, 1]]
    assert got["band"] == {"low": [1, 2], "high": [1, 4], "mean": [1, 3]}
    assert got["shade"] == ["r0", "r8", "r-none", "r4"]
    assert got["num"] == ["–", "−0.5", "1,234", "1.00e-9", "NaN", "−∞"]


def test_a_site_without_runs_says_what_to_expect(page):
    from tests.view.site import serve

    with serve(Site(runs=[])) as url:
        page.goto(url)
        expect(page.get_by_text("No runs in this folder yet.")).to_be_visible()
        page.goto("about:blank")


def test_addresses_survive_any_name(page, url):
    shown(page, url, "#/")
    names = ["a/b", "a//b", "50%", "%2F", "a?b#c", "épisode é/", "step/3/episode/x", '"><b>', "a b"]
    got = page.evaluate(
        """async (names) => {
            const { link } = await import('/ui.js');
            return names.map((name) => link.episode('calc-seed0', 3, name, 7));
        }""",
        names,
    )
    for name, address in zip(names, got, strict=True):
        page.evaluate("(address) => { location.hash = address; }", address)
        expect(page.locator(".crumbs h1")).to_have_text(name)


def test_a_run_that_changes_all_the_time_is_shown(page, url, site):
    stop = threading.Event()

    def change() -> None:
        while not stop.wait(0.02):
            site.tell({"changed": ["calc-seed0"]})

    thread = threading.Thread(target=change)
    thread.start()
    try:
        page.route("**/api/runs/calc-seed0*", lambda route: (page.wait_for_timeout(150), route.continue_()))
        shown(page, url, f"#/run/{RUN}")
        expect(page.locator("figure.chart")).to_have_count(len(SERIES))
    finally:
        stop.set()
        thread.join()
        page.unroute_all(behavior="ignoreErrors")
