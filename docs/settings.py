"""The guide's tables of settings, from the comments at their definitions.

python -m docs.settings    # writes docs/guide/settings.md
"""

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from nanoengine import EngineConfig, SamplingParams
from nanoengine.flags import describe
from nanoengine.sampling_params import choices

PAGE = Path(__file__).parent / "guide" / "settings.md"
PARTS = [
    ("An engine", "`LLM`, `AsyncLLM`, `EngineConfig`; `nanoengine serve` has a flag for each", EngineConfig),
    ("A request", "`SamplingParams`", SamplingParams),
]


def row(item: Any, text: str) -> str:
    """A line of the table: the setting, its default, what it does and which values it takes."""
    default = getattr(item.default, "name", item.default)  # of an enum, the name
    values = ", ".join(f"`{one}`" for one in choices(item.type))
    cells = (
        item.name,
        "" if default in (None, MISSING) else f"`{default}`",
        text + f" ({values})" * bool(values),
    )
    return f"| `{cells[0]}` | {cells[1]} | {cells[2]} |"


def page() -> str:
    """The text of the page."""
    text = "# Settings\n\nThis page is generated from the source by `python -m docs.settings`.\n"
    for title, where, config in PARTS:
        texts = describe(config)
        rows = [row(item, texts[item.name]) for item in fields(config) if item.init]
        text += f"\n## {title}\n\n{where}.\n\n| setting | default | what it does |\n|---|---|---|\n"
        text += "\n".join(rows) + "\n"
    return text + "\n[Guide](README.md)\n"


if __name__ == "__main__":
    PAGE.write_text(page())
