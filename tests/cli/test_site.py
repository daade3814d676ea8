"""The documentation site builds with strict links, from disk alone; its drawings and its glossary are true."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import house
import pytest
from documents import ROOT

from posttrain.algorithms.all_algorithms import EVERY
from posttrain.cli.command_table import COMMANDS
from posttrain.config.verbs import VERBS
from posttrain.core.foreign_options import ELSEWHERE
from posttrain.envs.play.load_env import BUILTIN
from posttrain.runs.metrics_table import METRICS
from posttrain.runs.record.schema import ROLLOUTS
from posttrain.verify import __all__ as verifiers

PACKAGE = ROOT / "posttrain"
DOCS = ROOT / "docs"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
site_is_installed = pytest.mark.skipif(
    not all(map(find_spec, ("mkdocs", "material", "mkdocstrings"))), reason='needs pip install ".[docs]"'
)


@site_is_installed
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_site_builds_strictly_lists_all_that_is_declared_and_needs_no_network(tmp_path: Path) -> None:
    built = subprocess.run(  # as `make docs` does it
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    check_reference(tmp_path)
    check_that_nothing_is_loaded(tmp_path)
    if CHROMIUM:
        check_in_a_browser(tmp_path)


def check_reference(site: Path) -> None:
    def text(page: str) -> str:
        return (site / page).read_text(encoding="utf-8")

    assert all(f"posttrain {command.name}" in text("reference/cli/index.html") for command in COMMANDS)
    assert all((site / "reference" / "cli" / f"{verb}.html").exists() for verb in VERBS)
    assert "--prompts" in text("reference/cli/rl.html") and "It decides data order" in text("reference/cli/rl.html")
    assert all(name in text("reference/config.html") for name in ("--max-tokens", *ELSEWHERE))
    assert all(f'id="{name}"' in text("reference/environments.html") for name in BUILTIN)
    assert all(f".{name}" in text("reference/verifiers.html") for name in verifiers)
    assert all(f"<code>{m.name}</code>" in text("reference/metrics.html") for m in METRICS)
    assert all(f"<code>{name}</code>" in text("reference/record.html") for name in ROLLOUTS.names if name != "kept")
    assert all((site / "algorithms" / f"{name}.html").exists() for name in EVERY)


def check_that_nothing_is_loaded(site: Path) -> None:
    """From the network: by the pages themselves. And the search has all of them in a file."""
    loaded = re.compile(r'<(?:script|img|iframe)[^>]*\ssrc="?https?:|<link[^>]*rel="?stylesheet[^>]*href="?https?:')
    for page in site.rglob("*.html"):
        assert not loaded.search(page.read_text(encoding="utf-8")), page
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    places = {entry["location"].partition("#")[0] for entry in json.loads(index.partition("=")[2])["docs"]}
    assert {"index.html", "glossary.html", "reference/cli/rl.html", "guides/environments.html"} <= places


def check_in_a_browser(site: Path) -> None:
    """Pages from disk, on a screen of 390 pixels: none is wider than that, none asks the network, search finds."""
    from playwright.sync_api import sync_playwright

    asked: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 390, "height": 800})
        page.on("request", lambda request: asked.append(request.url))
        for name in ("glossary", "architecture", "reference/cli/rl", "reference/record", "guides/scaling", "index"):
            page.goto((site / f"{name}.html").as_uri())
            assert page.evaluate("document.scrollingElement.scrollWidth") <= 390, name
        page.locator("label[for=__search]").first.click()
        page.locator("input[name=query]").press_sequentially("staleness")
        page.locator(".md-search-result__item").first.wait_for(timeout=60_000)
        browser.close()
    assert not [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]


def test_drawn_house_has_every_room_on_its_floor_and_the_map_names_each() -> None:
    assert house.PLACE.read_text(encoding="utf-8") == house.drawn(), "draw it again: python tools/house.py"
    rooms = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()}
    named = re.findall(r"^\| `(\w+)` \|", (DOCS / "architecture.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(named) >= rooms == {room for floor in house.floors() for room in floor}


def test_files_that_glossary_and_map_name_exist() -> None:
    """Of the package: in the glossary anywhere, in the map's table of rooms in the room of the line."""
    for path in re.findall(r"`([a-z_]+/[\w/]*(?:\.py)?)`", (DOCS / "glossary.md").read_text(encoding="utf-8")):
        assert (PACKAGE / path).exists() or (ROOT / path).exists(), path
    rooms = re.findall(r"^\| `(\w+)` \|(.*)", (DOCS / "architecture.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = [(room, path) for room, told in rooms for path in re.findall(r"`([\w/]+(?:/|\.py))`", told)]
    assert len(named) > 30
    assert not [(room, path) for room, path in named if not (PACKAGE / room / path).exists()]


def test_names_that_the_glossary_gives_are_in_the_files_that_it_names() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    found = re.findall(r"`([\w/]+\.py)` \(((?:`[\w.]+`(?:, )?)+)\)", text)
    assert len(found) > 15
    for path, names in found:
        source = (PACKAGE / path).read_text(encoding="utf-8")
        for name in re.findall(r"`([\w.]+)`", names):
            assert re.search(rf"(?:class|def) {name.rpartition('.')[2]}\b|^{name} = ", source, re.MULTILINE), (
                path,
                name,
            )
