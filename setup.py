"""The description of the package on PyPI: README.md without links that lead nowhere there. pyproject.toml says the rest."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://)([^)\s]+)\)")


def description(readme: str, address: str | None) -> str:
    """The README for readers outside the repository. With the repository's `address`, relative links and pictures get it;
    without one, they become their text.
    """

    def outside(found: re.Match[str]) -> str:
        picture, text, path = found.groups()
        return f"{picture}[{text}]({address}/{'raw' if picture else 'blob'}/HEAD/{path})" if address else text

    return LINK.sub(outside, readme)


if __name__ == "__main__":
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (HERE / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=description(text, project.get("urls", {}).get("Source")),
        long_description_content_type="text/markdown",
    )
