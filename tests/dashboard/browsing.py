"""A real Chromium, and what is looked for on each page.

``.ci/chromium.py`` has the browser, or says why there is none; ``LORA_FS_REQUIRE_CHROMIUM`` makes that
a failure.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.base import AXE_FILE_PATH
from playwright.sync_api import Browser, Page, expect, sync_playwright

SCRIPT = Path(__file__).parents[2] / ".ci/chromium.py"
Open = Callable[..., Page]
WITHIN_MS = 60_000  # an expectation is waited for; how long a busy machine takes to draw is not promised
expect.set_options(timeout=WITHIN_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    program = found.stdout.strip()
    if not program:
        assert "LORA_FS_REQUIRE_CHROMIUM" not in os.environ, found.stderr
        pytest.skip(found.stderr.strip())
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens a page that may ask its own origin alone, and says nothing on its console."""
    said: list[str] = []
    contexts = []

    def start(url: str, *, quiet: bool = True, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": 1400, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WITHIN_MS)
        if quiet:
            page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        origin = url.partition("#")[0]
        page.on("request", lambda one: None if one.url.startswith(origin) else said.append(one.url))
        page.goto(url)
        return page

    yield start
    for context in contexts:
        context.close()
    assert said == []


def violations(page: Page) -> list[str]:
    """What axe has against the page as it is, best practices included."""
    if not page.evaluate("typeof axe !== 'undefined'"):
        page.evaluate(AXE_FILE_PATH.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run()")["violations"]
    return [f"{one['id']}: {node['html'][:200]}" for one in found for node in one["nodes"]]
