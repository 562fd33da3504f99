"""Take the pictures of the dashboard: ``python .ci/dashboard_pictures.py docs --minutes 10``."""

from __future__ import annotations

import argparse
import asyncio
import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parent))

from pictured import pictured

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
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=found.stdout.strip(), args=["--no-sandbox"])
            for scheme, shown in (("light", "sort=state"), ("dark", "adapter=billing-de&sort=state")):
                size = {"width": 1440, "height": 860}
                page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
                page.goto(f"{fleet.urls[0]}/#{shown}")
                page.wait_for_selector(f'html[data-drawn="{len(fleet.names)}"]')
                page.wait_for_timeout(2500)
                shot = Image.open(io.BytesIO(page.screenshot()))
                small = shot.convert("RGB").quantize(256, dither=Image.Dither.NONE)
                small.save(options.folder / f"dashboard-{scheme}.png", optimize=True)
            browser.close()


if __name__ == "__main__":
    main()
