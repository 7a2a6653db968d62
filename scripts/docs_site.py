"""MkDocs hooks (``hooks`` in ``mkdocs.yml``) that adapt pages for GitHub and Sphinx docstrings."""

from __future__ import annotations

import re
from typing import Any

from pymdownx.slugs import slugify

#: A link to a file outside docs/, which is not part of the site.
_OUTSIDE = re.compile(r"\[([^][]+)\]\((?:\.\./)+(?!docs/)[^()]*\)")
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod|obj):<code>~?([^<]+)</code>")


def on_config(config: Any) -> Any:
    """Names anchors as GitHub does."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replaces links to files of the repository by their texts."""
    up = page.file.src_uri.count("/")
    return _OUTSIDE.sub(lambda link: link[1] if _leaves(link[0], up) else link[0], markdown)


def _leaves(link: str, up: int) -> bool:
    return link.count("../") > up


def on_page_content(html: str, **_: Any) -> str:
    """Renders Sphinx roles, and the colons before examples."""
    return _ROLE.sub(r"<code>\1</code>", html).replace("::</p>", ":</p>")
