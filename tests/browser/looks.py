"""Whether a page can be read and used: contrast, width, keyboard, names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from selenium.webdriver import ActionChains, Keys

from tests.browser.chromium import PHONE, Chromium

_SCRIPT = (Path(__file__).parent / "looks.js").read_text()

#: Roles of which a screen reader reads the name, and nothing else.
_NAMED = frozenset(
    {"button", "link", "textbox", "searchbox", "checkbox", "radio", "combobox", "spinbutton"}
)


def _ask(browser: Chromium, function: str) -> Any:
    return browser.run(f"{_SCRIPT}\nreturn {function}();")


def complaints_of_looks(browser: Chromium) -> list[str]:
    """Returns the page's defects: contrast below AA, and markup."""
    with browser.whole_page():
        return [*_ask(browser, "contrast"), *_ask(browser, "markup"), *unnamed(browser)]


def too_wide_on_a_phone(browser: Chromium) -> list[str]:
    """Returns the elements that make the page scroll sideways on a phone."""
    browser.size(PHONE)
    return list(_ask(browser, "tooWide"))


def unnamed(browser: Chromium) -> list[str]:
    """Controls for which a screen reader has no name."""
    tree = browser.cdp("Accessibility.getFullAXTree")["nodes"]
    return [
        f"a {node['role']['value']} has no name"
        for node in tree
        if not node.get("ignored")
        and node.get("role", {}).get("value") in _NAMED
        and not node.get("name", {}).get("value", "").strip()
    ]


def not_reached_by_tab(browser: Chromium) -> list[str]:
    """Controls that the Tab key does not reach, or that do not show that they have the focus."""
    browser.run("document.activeElement.blur(); window.scrollTo(0, 0)")
    browser.run(f"{_SCRIPT}\nwindow.wanted = new Set(controls()); window.got = new Set();")
    complaints = []
    # A field for a timestamp takes a Tab for each of its parts.
    for _ in range(browser.run("return window.wanted.size") + 30):
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
        bare = browser.run(_FOCUS)
        if bare:
            complaints.append(bare)
    left = browser.run(
        f"{_SCRIPT}\nreturn [...window.wanted].filter((e) => !window.got.has(e)).map(named);"
    )
    return [*complaints, *(f"Tab never reaches {message}" for message in left)]


#: Notes which element has the focus; returns a complaint if nothing shows it.
_FOCUS = f"""{_SCRIPT}
const now = document.activeElement;
window.got.add(now);
// Of an instant the browser marks the part that has it.
if (now === document.body || now.type === "datetime-local") return null;
const style = getComputedStyle(now);
const outlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
if (outlined || style.boxShadow !== "none") return null;
return `nothing shows that ${{named(now)}} has the focus`;
"""
