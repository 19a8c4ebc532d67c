"""A real Chromium for the tests of the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.view.site import Site, serve

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser")  # the first takes half the time


def chromium() -> str | None:
    """Where Debian's package put it, or None."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for a file; where AGENTRL_BROWSER is "required" (CI), its absence is a failure.

    Playwright keeps an event loop running in this thread, so it must be gone before another file's async tests.
    """
    program = chromium()
    try:
        from playwright.sync_api import expect, sync_playwright
    except ImportError:
        program = None
    if program is None:
        why = f"needs one of the programs {', '.join(PROGRAMS)} (Debian's packages) and `pip install playwright`"
        if os.environ.get("AGENTRL_BROWSER") == "required":
            raise AssertionError(f"AGENTRL_BROWSER=required, but the browser is missing: {why}")
        pytest.skip(why)
    expect.set_options(timeout=20_000)  # the machine may do much else
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


class Errors(list[str]):
    """What the page complained about; a test that expects a complaint empties it."""


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1400, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(30_000)
    yield context
    context.close()


@pytest.fixture
def errors() -> Errors:
    return Errors()


@pytest.fixture
def page(context: BrowserContext, errors: Errors) -> Iterator[Page]:
    """A page whose script errors and refused resources fail the test."""
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    yield page
    assert errors == []


@pytest.fixture(scope="module")
def site() -> Site:
    return Site()


@pytest.fixture(scope="module")
def url(site: Site) -> Iterator[str]:
    with serve(site) as address:
        yield address
