"""Where Chromium is, and how it is started: for the PDF and for the tests of the pages."""

from __future__ import annotations

import shutil

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Root may not use the sandbox; all else keeps it from asking the network.
ARGUMENTS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
).split()


def find_browser() -> str | None:
    """Path of the first browser that is installed."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)
