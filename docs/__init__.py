"""The lessons, which start at README.md, and their code."""

import re
from pathlib import Path
from typing import Any


def lesson(*numbers: int) -> dict[str, Any]:
    """Return the names that the longer code blocks of lessons 1, 2 and 4 define: those without `>>>`."""
    names: dict[str, Any] = {}
    for number in numbers:
        (page,) = Path(__file__).parent.glob(f"{number:02}-*.md")
        for block in re.findall(r"^```python\n(?!>>>)(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            exec(compile(block, page.name, "exec"), names)
    return names
