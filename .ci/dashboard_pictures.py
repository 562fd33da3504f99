"""Take the pictures of the pages of a replica and a gateway.

``python .ci/dashboard_pictures.py docs --minutes 10``
"""

from __future__ import annotations

import argparse
import asyncio
import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parent))

from pictured import pictured

from lora_fs.demo.process import free_port, spawn
from lora_fs.demo.volume import LORA_FS

CHROMIUM = Path(__file__).with_name("chromium.py")
REPLICAS = 8


def main() -> None:
    """Start, ask, look."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=10)
    options = parser.parse_args()
    found = subprocess.run([sys.executable, CHROMIUM], capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory() as folder, pictured(Path(folder), REPLICAS) as fleet:
        asyncio.run(fleet.ask(time.monotonic() + 60 * options.minutes))
        with sync_playwright() as playwright, gateway(fleet.urls, Path(folder)) as before_all:
            browser = playwright.chromium.launch(executable_path=found.stdout.strip(), args=["--no-sandbox"])
            for scheme, shown in (("light", "sort=state"), ("dark", "adapter=billing-de&sort=state")):
                page = opened(browser, f"{fleet.urls[0]}/#{shown}", scheme, height=860)
                page.wait_for_selector(f'html[data-drawn="{len(fleet.names)}"]')
                save(page, options.folder / f"dashboard-{scheme}.png")
            page = opened(browser, f"{before_all}/#adapter=billing-de", "light", height=440)
            save(page, options.folder / "gateway.png")
            browser.close()


@contextmanager
def gateway(replicas: Sequence[str], work: Path) -> Iterator[str]:
    """Yields the address of one before all replicas but the last, which it does not find."""
    port = free_port()
    gone = f"http://127.0.0.1:{free_port()}"
    named = [word for url in (*replicas[:-1], gone) for word in ("--replica", url)]
    url = f"http://127.0.0.1:{port}"
    command = [LORA_FS, "gateway", "--host", "127.0.0.1", "--port", str(port), *named]
    process = spawn("gateway", command, log=work / "gateway.log", url=url, env={})
    try:
        process.wait_ready("/health")
        yield url
    finally:
        process.stop()


def opened(browser: Browser, url: str, scheme: str, *, height: int) -> Page:
    """A page of an ordinary window."""
    size = {"width": 1440, "height": height}
    page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
    page.goto(url)
    return page


def save(page: Page, path: Path) -> None:
    """Keep what it shows, in a small file."""
    page.wait_for_timeout(2500)
    shot = Image.open(io.BytesIO(page.screenshot()))
    shot.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
