"""A headless Chromium for pages that nanoengine makes."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver


@contextmanager
def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    """Start a browser with an empty profile, no requests of its own, and a log of its console.

    `driver.get_log("browser")` has what pages wrote there; skips the test where there is no browser.
    """
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    switches = "headless no-sandbox disable-gpu disable-quic disable-dev-shm-usage no-first-run "
    switches += "disable-background-networking disable-component-update disable-sync"
    for switch in (*switches.split(), f"user-data-dir={profile}", "window-size=1280,900"):
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        yield browser
    finally:
        browser.quit()


@contextmanager
def seen_at(browser: webdriver.Chrome, width: int, scheme: str = "light") -> Iterator[None]:
    """Show pages on a screen of this width, light or dark, until the end of the block."""
    size = {"width": width, "height": 900 if width > 500 else 844, "deviceScaleFactor": 2}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**size, "mobile": width < 500})
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
