"""Hooks for mkdocs (mkdocs.yml): they order the pages, and rewrite links that lead out of docs/."""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
REPOSITORY = os.environ.get("GITHUB_REPOSITORY")  # owner/name, set in a GitHub workflow


def on_config(config: Any) -> Any:
    """Build the navigation. A new page is placed by its file name."""
    lessons = sorted(path.name for path in DOCS.glob("[0-9]*.md"))
    guide = sorted(f"guide/{path.name}" for path in (DOCS / "guide").glob("*.md"))
    others = sorted({path.name for path in DOCS.glob("*.md")} - {"README.md", "one-evening.md", *lessons})
    config.nav = [
        {"Contents": "README.md"},
        {"In one evening": "one-evening.md"},
        {"A run, step by step": "run.html"},
        {"The engine in this tab": "live.html"},
        {"Lessons": lessons + others},
        {"Guide": ["guide/README.md", *(page for page in guide if page != "guide/README.md")]},
    ]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that lead out of docs/ at the repository. If it is unknown, keep only the links' texts."""
    folder = posixpath.dirname(page.file.src_uri)

    def replace(link: re.Match[str]) -> str:
        text, target = link.groups()
        place = posixpath.normpath(posixpath.join("docs", folder, target))
        if "://" in target or place.startswith("docs/"):
            return link[0]
        return f"[{text}](https://github.com/{REPOSITORY}/blob/main/{place})" if REPOSITORY else text

    markdown = re.sub(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)\)", replace, markdown)
    return markdown.replace("\n<details>", '\n<details markdown="1">')


def on_post_build(config: Any) -> None:
    """Make the two pages of a run link to the lessons' HTML pages instead of their Markdown files."""
    for name in ("run.html", "live.html"):
        page = Path(config["site_dir"]) / name
        page.write_text(
            page.read_text(encoding="utf-8").replace('lessons = ".md"', 'lessons = ".html"'), encoding="utf-8"
        )
