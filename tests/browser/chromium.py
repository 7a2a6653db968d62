"""A headless Chromium, as the tests drive it: pages, users, phones, darkness and pictures."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selenium.common.exceptions import StaleElementReferenceException, WebDriverException
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

#: Width and height of the window, in CSS pixels.
DESKTOP = (1280, 900)
PHONE = (390, 844)

#: Airflow keeps its token in this cookie.
_TOKEN = "_token"

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def programs() -> tuple[str, str] | None:
    """Returns where the browser and its driver are, or ``None`` if one is not on PATH."""
    paths = [path for name in _BROWSERS if (path := shutil.which(name))]
    driver = shutil.which("chromedriver")
    return (paths[0], driver) if paths and driver else None


class Chromium:
    """One browser, for one Airflow; it finds no other host.

    :param site: The address of the Airflow: ``http://127.0.0.1:…``.
    :param folder: Where its profile goes.
    """

    def __init__(self, site: str, browser: str, driver: str, folder: Path) -> None:
        self.site = site
        options = ChromeOptions()
        options.binary_location = browser
        for argument in (
            "--headless=new",
            "--lang=en-US",
            f"--user-data-dir={folder}",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--hide-scrollbars",
            # What a page would fetch from another host fails, and is seen in `complaints`.
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
        ):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = Chrome(options=options, service=ChromeService(executable_path=driver))
        self.driver.set_page_load_timeout(60)
        self.size(DESKTOP)

    def quit(self) -> None:
        """Ends the browser and its driver."""
        self.driver.quit()

    # ------------------------------------------------------------------------------------- state
    def fresh(self) -> None:
        """Logs out, and resets to a light desktop again."""
        self.driver.switch_to.default_content()
        with contextlib.suppress(WebDriverException):
            self.driver.switch_to.alert.dismiss()
        self.driver.get("about:blank")
        self.cdp("Network.clearBrowserCookies")
        self.size(DESKTOP)
        self.colours("light")
        self.complaints()

    def log_in(self, token: str) -> None:
        """Become the user to whom Airflow gave ``token``."""
        self.cdp(
            "Network.setCookie", name=_TOKEN, value=token, url=self.site, httpOnly=True, path="/"
        )

    def size(self, size: tuple[int, int]) -> None:
        """Sets the window's width and height; a narrow one is a phone's."""
        self._size = width, height = size
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def colours(self, scheme: str) -> None:
        """Prefer ``light`` or ``dark`` colours."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.cdp("Emulation.setEmulatedMedia", features=features)

    # ------------------------------------------------------------------------------------- pages
    def open(self, path: str) -> None:
        """Opens a page of the site."""
        self.driver.switch_to.default_content()
        self.driver.get(self.site + path)

    def enter_frame(self, fragment: str, timeout: float = 60.0) -> None:
        """Goes into the frame whose address has ``fragment``, as soon as it has a page of ours."""
        frame = self.find(f"iframe[src*='{fragment}']", timeout)
        self.driver.switch_to.frame(frame)
        self.find("main", timeout)

    def find(self, css: str, timeout: float = 30.0) -> WebElement:
        """Waits for an element that is to be seen, and returns it."""
        elements: list[WebElement] = []

        def there(driver: Any) -> bool:
            with contextlib.suppress(StaleElementReferenceException):
                elements[:] = [e for e in self.all(css) if e.is_displayed()]
            return bool(elements)

        self.until(there, f"no {css!r} is to be seen", timeout)
        return elements[0]

    def all(self, css: str) -> list[WebElement]:
        """Returns all elements that are there now."""
        return list(self.driver.find_elements(By.CSS_SELECTOR, css))

    def button(self, text: str, *, within: str = "body", timeout: float = 30.0) -> WebElement:
        """Waits for a button with exactly this text, and returns the last."""
        return self.saying(f"{within} button, {within} [role=menuitem]", text, timeout)

    def link(self, text: str, *, within: str = "body", timeout: float = 30.0) -> WebElement:
        """Waits for a link with exactly this text, and returns the last."""
        return self.saying(f"{within} a[href]", text, timeout)

    def saying(self, css: str, text: str, timeout: float = 30.0) -> WebElement:
        """Waits for an element with exactly this text, and returns the last."""
        elements: list[WebElement] = []

        def there(driver: Any) -> bool:
            with contextlib.suppress(StaleElementReferenceException):
                elements[:] = [
                    e for e in self.all(css) if e.text.strip() == text and e.is_displayed()
                ]
            return bool(elements)

        self.until(there, f"no {css} says {text!r}", timeout)
        return elements[-1]

    def text(self, css: str = "body") -> str:
        """Return the text that is to be seen in the first such element, ``""`` if there is none."""
        with contextlib.suppress(StaleElementReferenceException):
            for element in self.all(css):
                return element.text
        return ""

    def until(self, condition: Any, complaint: str, timeout: float = 30.0) -> None:
        """Waits until ``condition(driver)`` holds.

        :raises AssertionError: If it does not; it says what was to be seen.
        """

        def say() -> str:
            return f"{complaint}, after {timeout:g} s, at {self.driver.current_url}:\n{self.text()}"

        try:
            WebDriverWait(self.driver, timeout, poll_frequency=0.1).until(condition)
        except WebDriverException:
            raise AssertionError(say()) from None

    def wait_text(self, words: str, css: str = "body", timeout: float = 30.0) -> None:
        """Waits until ``words`` are to be seen in an element."""
        self.until(lambda _: words in self.text(css), f"{css} does not say {words!r}", timeout)

    def run(self, script: str, *arguments: Any) -> Any:
        """Runs JavaScript in the page, as its developer tools do, and returns what it returns."""
        return self.driver.execute_script(script, *arguments)

    def complaints(self) -> list[str]:
        """Returns what the console said since the last look: errors, refusals, missing files."""
        entries: list[dict[str, Any]] = self.driver.get_log("browser")
        return [f"{entry['level']} {entry['message']}" for entry in entries]

    # ---------------------------------------------------------------------------------- pictures
    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Writes a PNG of what is to be seen, or of the whole page."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self.whole_page() if whole else contextlib.nullcontext():
            path.write_bytes(self.driver.get_screenshot_as_png())

    @contextlib.contextmanager
    def whole_page(self) -> Iterator[None]:
        """Makes the window as high as the page: nothing is below its edge."""
        width, height = self._size
        self.size((width, max(height, self.run("return document.documentElement.scrollHeight"))))
        try:
            yield
        finally:
            self.size((width, height))

    def cdp(self, command: str, **parameters: Any) -> Any:
        """Sends a command of the Chrome DevTools Protocol."""
        return self.driver.execute_cdp_cmd(command, json.loads(json.dumps(parameters)))
