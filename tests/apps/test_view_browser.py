"""The pages of `posttrain view` in a real browser: Debian's Chromium, driven by Playwright. Skipped where there is none."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import generated_runs
import pytest

from posttrain.cli.main import main
from posttrain.runs.lock import Lock

playwright = pytest.importorskip(
    "playwright.sync_api", reason="the pages are tested with Playwright, which is not installed"
)

from viewed import viewing  # noqa: E402

from posttrain.apps.view.api import Answers, Query  # noqa: E402
from posttrain.apps.view.evaluation_file import EvaluationFile  # noqa: E402
from posttrain.apps.view.html_export import Selection, exported  # noqa: E402
from posttrain.apps.view.view_command import opened  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the pages are tested in Chromium: apt-get install chromium")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip
SMALL = {"width": 1280, "height": 720}


@contextmanager
def served(folders: list[Path]) -> Iterator[str]:
    """The address of a server in a thread."""
    runs = opened([str(folder) for folder in folders])
    for run in runs:
        run.begin()
    with viewing(runs) as pages:
        yield pages.address
    for run in runs:
        run.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("runs")
    return [
        generated_runs.make_run(place / "a", steps=6, tokens=24),
        generated_runs.make_run(place / "b", steps=6, tokens=24, seed=1),
        generated_runs.make_run(place / "agent", steps=2, agent=True, evals=0),
        generated_runs.make_items(place / "items"),
        generated_runs.make_hostile(place / "hostile"),
        generated_runs.make_seen(place / "seen"),
    ]


@pytest.fixture(scope="module")
def address(folders: list[Path]) -> Iterator[str]:
    with served(folders) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


class Watched:
    """A page, and what went wrong on it."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.page = browser.new_page(viewport=SMALL, **options)
        self.page.set_default_timeout(20_000)
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("dialog", lambda dialog: self.wrong.append("dialog"))


def until(page: Any, expression: str, seconds: float = 20.0) -> None:
    """Wait until it holds: Playwright's own way evaluates text within the page, which the page's policy forbids."""
    for _ in range(int(seconds / 0.05)):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never came true: {expression}")


@pytest.fixture
def watched(browser: Any) -> Iterator[Watched]:
    watched = Watched(browser)
    yield watched
    watched.page.close()
    assert not watched.wrong


PLACES = [
    "#/0/overview", "#/0/rollouts", "#/0/rollouts?as=groups&ask=lost", "#/0/rollouts?q=bunny&sort=-reward&reward=0.5..1",
    "#/0/rollout/3/5", "#/0/rollout/3e/2", "#/0/group/3/5?c=surprise", "#/0/step", "#/0/step/3?by=push", "#/0/compare",
    "#/0/compare?a=0&b=0", "#/2/rollout/1/3", "#/2/group/1/3", "#/3/overview", "#/3/group/1/2", "#/3/rollout/1/2",
    "#/3/rollouts", "#/3/rollouts?as=groups", "#/3/step/1", "#/5/rollouts", "#/5/rollout/1/0", "#/5/group/1/0",
]  # fmt: skip


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.long)])
def test_every_page_draws_without_an_error_and_fits_the_screen(browser: Any, address: str, theme: str) -> None:
    watched = Watched(browser, color_scheme=theme)
    for place in PLACES:
        watched.page.goto(address + place)
        watched.page.wait_for_selector("main .card")
        watched.page.wait_for_timeout(150)
        assert watched.page.evaluate("document.documentElement.dataset.theme") == theme
        assert watched.page.evaluate("document.scrollingElement.scrollWidth") <= SMALL["width"], place
        assert watched.page.locator(".problem").count() == 0, place
    assert not watched.wrong and all(url.startswith(address) for url in watched.asked)
    watched.page.close()


def test_what_a_model_wrote_never_becomes_more_than_text(watched: Watched, address: str) -> None:
    page = watched.page
    page.add_init_script(
        "addEventListener('securitypolicyviolation', (e) => console.error('policy: ' + e.violatedDirective))"
    )
    places = ["overview", "rollouts", "rollouts?as=groups", "step/1", "compare"]
    places += [f"{kind}/1/{index}" for kind in ("rollout", "group") for index in range(len(generated_runs.HOSTILE))]
    for place in places:
        page.goto(f"{address}#/4/{place}")
        page.wait_for_selector("main .card")
        page.wait_for_timeout(100)
        assert page.evaluate("window.pwned") is None, place
        assert page.evaluate("document.scripts.length") == 3
        assert (
            page.locator("main :is(script, img, svg[onload], b b, i b, u, iframe, object, a[href^=javascript])").count()
            <= 1
        )
        said = page.evaluate("document.body.innerText")
        assert not set(said) & set("\x00\x01\x07\x1b\x7f\x9b\u202e\u202c\u2066\u200b\ufeff"), place
        assert len(said) < 2_000_000
    page.goto(f"{address}#/4/rollout/1/0")
    page.wait_for_selector(".tokens")
    assert "<script>window.pwned = 1</script>" in page.inner_text("main")


def figure(mean: float) -> dict[str, Any]:
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "tasks": 8}


def test_the_figures_of_a_suite_are_drawn_as_text_whatever_its_models_are_called(
    watched: Watched, folders: list[Path], tmp_path: Path
) -> None:
    other = generated_runs.HOSTILE["script"]
    wins = {"won": 5, "lost": 1, "tied": 2, "p": 0.2, "p_holm": 0.4, "verdict": "undecided"}
    side = {
        "figures": {"tasks": 8, "reward": figure(0.3), "pass@2": figure(0.4)},
        "rates": {"tokens": 4.5, "truncated": 0.25},
    }
    against = {"model": other, **side, "differences": {"reward": figure(0.2)}, "wins": wins}
    parts = {"sums": {"in_distribution": False, **side, "against": [against]}}
    averages = {
        "all": {
            **figure(0.3),
            "parts": 1,
            "against": [{"model": other, "figures": figure(0.1), "difference": figure(0.2)}],
        }
    }
    file = tmp_path / "suite.json"
    file.write_text(json.dumps({"model": "model", "parts": parts, "averages": averages}))
    alone, beside = tmp_path / "suite.html", opened([str(folders[0])])
    assert main(["view", str(file), "--export", str(alone)]) == 0
    with viewing(beside, evaluations=[EvaluationFile.read(file)]) as pages:
        for address in (f"{pages.address}#/0/evaluation/0", alone.as_uri()):
            watched.page.goto(address)
            watched.page.wait_for_selector("main table")
            said = watched.page.inner_text("main")
            assert (
                "reward 0.3 [0.2, 0.4]" in said
                and "+0.2 [+0.1, +0.3]" in said
                and "undecided" in said
                and "25%" in said
            )
            assert "<script>" in said and watched.page.evaluate("window.pwned") is None
            assert watched.page.evaluate("document.scrollingElement.scrollWidth") <= SMALL["width"]
        watched.page.goto(pages.address)
        watched.page.wait_for_selector("main .card, main .problem")
        watched.page.keyboard.press("v")
        until(watched.page, "location.hash.includes('/evaluation')")
        watched.page.goto("about:blank")  # or it would ask a server that is gone
    beside[0].close()


def test_the_keys_lead_everywhere(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address)
    page.wait_for_selector(".question")
    page.keyboard.press("r")
    page.wait_for_selector("tr.sel")
    page.keyboard.press("j")
    page.keyboard.press("j")
    until(page, "location.hash.includes('sel=2')")
    page.keyboard.press("Enter")
    page.wait_for_selector(".one")
    assert "/rollout/1/2" in page.url
    page.keyboard.press("l")
    until(page, "location.hash.includes('/rollout/1/3')")
    page.keyboard.press("k")
    until(page, "location.hash.includes('/rollout/1/2')")
    page.wait_for_selector(".t.at")
    page.keyboard.press("3")
    until(page, "location.hash.includes('c=')")
    page.keyboard.press("ArrowRight")
    until(page, "location.hash.includes('t=')")
    page.keyboard.press("g")
    page.wait_for_selector(".replies")
    page.keyboard.press("?")
    assert page.locator(".help kbd").count() > 15
    page.keyboard.press("Escape")
    page.wait_for_selector(".help", state="detached")
    page.keyboard.press("c")
    page.wait_for_selector(".compare-grid")
    page.keyboard.press("s")
    until(page, "location.hash.includes('a=1')")
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_keys_pressed_while_an_answer_is_waited_for_count_from_what_was_asked(
    watched: Watched, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, kept = watched.page, Answers.of

    def slowly(answers: Answers, path: str, query: Query) -> Any:
        time.sleep(0 if path == "runs" else 0.3)
        return kept(answers, path, query)

    def press(keys: str, expected: str) -> None:
        for key in keys:
            page.keyboard.press(key)
        until(page, f"location.hash.includes({expected!r})")
        page.wait_for_timeout(700)
        assert expected in page.url, "it stays there"

    monkeypatch.setattr(Answers, "of", slowly)
    page.goto(address)
    page.wait_for_selector(".question")
    press("rjj", "sel=2")
    page.goto(address + "#/0/rollout/1/2")
    page.wait_for_selector(".t.at")
    press("lll", "/rollout/1/5")
    press("kkg", "/group/1/3")
    page.goto(address + "#/0/group/1/0")
    page.wait_for_selector(".visit >> nth=1")
    press("jk", "/group/1/0")
    page.goto(address + "#/0/step/2")
    page.wait_for_selector(".two-columns")
    press("]]", "/step/4")
    page.goto(address + "#/0/compare?a=0&b=1")
    page.wait_for_selector(".compare-grid")
    press("sss", "a=1")


def test_a_rollout_that_is_walked_to_begins_at_its_own_first_token(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address + "#/2/rollout/1/0")
    page.wait_for_selector(".t.at")
    for index in range(1, 12):
        page.keyboard.press("l" if index % 8 else "j")
        until(page, f"document.querySelector('main b')?.textContent === 'rollout {index}'")
        row = page.evaluate(f"fetch('api/2/rollout/1/{index}').then((a) => a.json())")
        first = next(start for kind, start, _, _, learned in row["spans"] if learned or kind == "sampled")
        until(page, f"document.querySelector('.t.at')?.dataset.i === '{first}'")


def test_the_rows_below_the_screen_are_drawn_once_it_is_scrolled(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address + "#/0/rollouts")
    page.wait_for_selector("tbody tr")
    height = page.evaluate("document.querySelector('.long').scrollHeight")
    assert page.locator("tbody tr").count() < 60
    page.evaluate("document.querySelector('.long').scrollTo(0, 1e9)")
    until(page, "document.querySelectorAll('tbody tr').length === 100")
    assert abs(page.evaluate("document.querySelector('.long').scrollHeight") - height) < 60
    page.keyboard.press("n")
    until(page, "location.hash.includes('offset=100')")
    page.wait_for_selector(".stale", state="detached")
    for _ in range(45):
        page.keyboard.press("j")
    until(page, "location.hash.includes('sel=45')")
    assert page.locator("tr.sel").count() == 1


def test_where_only_beginnings_are_searched_the_page_says_so(
    browser: Any, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.apps.view.rollout_store.TEXT_BYTES", 100)
    with served([folders[0]]) as address:
        watched = Watched(browser)
        watched.page.goto(address + "#/0/rollouts?q=bunny")
        watched.page.wait_for_selector("text=only the first 80 characters of each text")
        assert not watched.wrong
        watched.page.close()


def test_an_address_brings_back_what_it_showed(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address + "#/0/rollouts")
    page.fill("input[type=search]", "bunny")
    until(page, "location.hash.includes('q=bunny')")
    page.click("th button:has-text('reward')")
    page.click("button:has-text('trained')")
    until(page, "location.hash.includes('fate=trained')")
    page.wait_for_selector(".stale", state="detached")
    shown = page.inner_text("tbody")
    again = page.context.browser.new_page()
    again.goto(page.url)
    again.wait_for_selector("tbody tr")
    again.wait_for_selector(".stale", state="detached")
    assert again.inner_text("tbody") == shown and "bunny" in shown
    again.close()


def test_the_means_of_a_filtered_list_stand_beside_the_rest(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address + "#/0/rollouts")
    page.wait_for_selector("tbody tr")
    assert page.locator(".means").count() == 0
    page.click("button:has-text('trained')")
    page.wait_for_selector(".means")
    said = page.inner_text(".means")
    count = page.inner_text("main").split(" rollouts")[0].split()[-1]
    assert f"these {count} / the other" in said and "trained 100% / 0%" in said and "animal" in said
    page.keyboard.press("x")
    page.wait_for_selector(".means", state="detached")


def test_dragging_over_a_histogram_chooses_a_range(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address + "#/0/rollouts")
    box = page.wait_for_selector("canvas[aria-label='histogram of length']").bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    page.mouse.up()
    until(page, "location.hash.includes('length=')")
    page.wait_for_selector(".stale", state="detached")
    low, high = map(float, page.evaluate("new URLSearchParams(location.hash.split('?')[1]).get('length')").split(".."))
    place = page.locator("thead th").all_inner_texts().index("length")
    lengths = [int(row.locator("td").nth(place).inner_text()) for row in page.locator("tbody tr").all()[:40]]
    assert lengths and all(low <= n <= high for n in lengths)


def test_rollouts_with_a_token_of_which_a_condition_holds_open_at_that_token(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address + "#/0/rollouts?sort=step")
    page.wait_for_selector("tbody tr")
    page.fill(".condition.token", "ratio > 1.2")
    page.keyboard.press("Enter")
    until(page, "location.hash.includes('token=')")
    page.wait_for_selector(".means")
    page.click("tbody tr >> nth=1")
    page.wait_for_selector(".one .t.at")
    assert "t=" in page.url
    ratio = page.evaluate("[...document.querySelectorAll('.side dt')].find((d) => d.innerText.startsWith('ratio'))"
                          ".nextSibling.innerText")  # fmt: skip
    assert float(ratio) > 1.2


def test_a_histogram_chooses_a_range_by_the_keyboard(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address + "#/0/rollouts")
    page.wait_for_selector("canvas[aria-label='histogram of length']")
    page.focus("canvas[aria-label='histogram of length']")
    for key in ("ArrowRight", "ArrowRight", "Shift+ArrowRight", "Shift+ArrowRight", "Enter"):
        page.keyboard.press(key)
    until(page, "location.hash.includes('length=')")
    assert "/rollouts" in page.url
    low, high = map(float, page.evaluate("new URLSearchParams(location.hash.split('?')[1]).get('length')").split(".."))
    assert low < high
    page.focus("canvas[aria-label='histogram of length']")
    page.keyboard.press("Escape")
    until(page, "!location.hash.includes('length=')")


def test_files_are_had_by_a_key(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address + "#/0/rollouts?step=2")
    page.wait_for_selector("tbody tr")
    with page.expect_download() as download:
        page.keyboard.press("e")
    assert download.value.suggested_filename == "posttrain-view.html"
    page.goto(address + "#/0/rollout/2/1")
    page.wait_for_selector(".t.at")
    with page.expect_download() as download:
        page.keyboard.press("f")
    assert download.value.suggested_filename == "rollout-2.txt"
    page.goto(address + "#/5/group/1/0")
    page.wait_for_selector(".frame img")
    page.keyboard.press("i")
    page.wait_for_selector(".frame.large")


def test_a_wrong_condition_is_told_at_its_field_and_the_list_stays(browser: Any, address: str) -> None:
    watched = Watched(browser)  # a refused request is an error in its console
    page = watched.page
    page.goto(address + "#/0/rollouts")
    page.wait_for_selector("tbody tr")
    page.fill(".condition", "nothing = 1")
    page.keyboard.press("Tab")
    page.wait_for_selector(".condition[aria-invalid=true]")
    assert "the columns are step" in page.inner_text(".problem") and page.locator("tbody tr").count() > 10
    page.fill(".condition", "length > 10")
    page.keyboard.press("Tab")
    page.wait_for_selector(".problem", state="detached")
    page.close()


def test_tasks_that_are_wrong_every_time_are_three_clicks_away(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address)
    page.click("nav a:has-text('Rollouts')")
    page.click("button:has-text('wrong every time')")
    until(page, "location.hash.includes('ask=wrong')")
    page.wait_for_selector(".stale", state="detached")
    page.click("tbody tr")
    page.wait_for_selector(".replies .reply")
    assert "0 of 8 right" in page.inner_text("main")


def test_a_step_in_a_chart_opens_its_rollouts(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address + "#/0/overview")
    box = page.wait_for_selector(".u-over").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 3, box["y"] + 20)
    until(page, "location.hash.includes('rollouts?step=6')")


def test_the_cursor_of_text_and_tracks_is_one(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address + "#/0/rollout/3/5?c=surprise")
    page.wait_for_selector(".t.at")
    page.hover(".t[data-i='15']")
    assert "token 15" in page.inner_text(".side")
    box = page.locator(".track canvas").first.bounding_box()
    page.mouse.click(box["x"] + box["width"] - 2, box["y"] + 5)
    last = page.locator(".t").count() - 1
    until(page, f"document.querySelector('.t.at').dataset.i === '{last}'")
    assert f"t={last}" in page.url


def test_the_clip_is_named_by_ratio_and_advantage_and_of_tokens_without_a_ratio_not_at_all(
    watched: Watched, address: str
) -> None:
    page = watched.page
    page.goto(address)
    page.wait_for_selector(".question")
    said = page.evaluate(
        """async (address) => {
          const { clipText, clipped } = await import(address + "measures.js");
          const a = (...values) => Float32Array.of(...values);
          const n = { learner: a(0, 1, NaN, -1), before: a(0, 0, NaN, 0), engine: a(1, 1, NaN, -1) };
          const row = { n, ids: [1, 2, 3, 4], isScored: [1, 1, 0, 1], advantage: -1 };
          const texts = [[2.849, -1], [2.849, 1], [0.5, -1], [0.5, 1], [1.1, 1]].map(([r, a]) => clipText(r, a, [0.8, 1.2]));
          return [texts, ...[false, true].map((sampler) => [...clipped(row, { bounds: [0.8, 1.2], sampler })].map(String))];
        }""",
        address,
    )
    assert said == [
        [
            "above 1.2, not clipped: A < 0",
            "above 1.2: no gradient in its last update",
            "below 0.8: no gradient in its last update",
            "below 0.8, not clipped: A > 0",
            "within 0.8 … 1.2",
        ],
        ["0", "0", "NaN", "-1"],
        ["-1", "0", "NaN", "0"],
    ]


def test_responses_of_an_item_stand_side_by_side_in_the_colours_of_what_each_token_contributed(
    watched: Watched, address: str
) -> None:
    page = watched.page
    page.goto(address + "#/3/group/1/2")
    page.wait_for_selector(".replies.two .reply .t")
    heads = page.locator(".reply-head").all_inner_texts()
    assert "chosen" in heads[0] and "rejected" in heads[1] and "margin" in page.inner_text("main")
    assert "contribution" in page.inner_text(".choices .on")
    for reply in page.locator(".reply").all():
        assert reply.locator("[class*=' p'], [class*=' n']").count() > 5
    tops = [reply.bounding_box()["y"] for reply in page.locator(".reply").all()]
    assert tops[0] == tops[1]
    page.goto(address + "#/3/rollouts")
    page.wait_for_selector("tbody tr")
    assert "invalid" not in page.inner_text("main") and "reward" not in page.inner_text("thead")


def test_what_judges_and_retrievers_said_stands_beside_the_reward(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address + "#/2/rollout/1/1")
    page.wait_for_selector(".tokens .t")
    said = page.inner_text(".side")
    assert "judge answered reward 4.5 clear 3 short 6" in " ".join(said.split())
    assert "A bunny is a young one." in said
    page.goto(address + "#/2/rollout/1/0")
    until(page, "document.querySelector('.side').innerText.includes('it would rather not say')")
    page.goto(address + "#/2/group/1/0")
    page.wait_for_selector(".reply")
    assert "judge 4.5" in page.inner_text(".replies")


def test_a_picture_is_shown_and_opens_larger_by_the_keyboard(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address + "#/5/rollout/1/0")
    page.wait_for_selector(".frame img")
    until(page, "document.querySelector('.frame img').naturalWidth === 12")
    page.focus(".frame")
    page.keyboard.press("Enter")
    page.wait_for_selector(".frame.large")
    assert page.locator(".frame.large img").bounding_box()["width"] > 400
    page.keyboard.press("Escape")
    page.wait_for_selector(".frame.large", state="detached")
    assert "sha256" not in page.inner_text("main")


def test_where_two_runs_part_is_said_with_links_to_both(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address + "#/0/compare?a=0&b=1")
    page.wait_for_selector(".parting a")
    assert "They differ first in step 1" in page.inner_text(".parting")
    page.click(".parting a.pill >> nth=1")
    page.wait_for_selector(".one .t.at")
    assert "#/1/rollout/1/" in page.url
    page.goto(address + "#/0/compare?a=0&b=1")
    page.click(".parting a:has-text('side by side')")
    until(page, "document.querySelectorAll('.replies').length === 2")


@pytest.mark.parametrize("of", ["ask=wrong&as=groups", "ask=longest", "where=text<>'%22%24x%60\\'"])
def test_the_question_that_is_shown_runs_in_a_terminal(
    of: str, watched: Watched, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    watched.page.goto(f"{address}#/0/rollouts?{of}")
    watched.page.wait_for_selector(".sql")
    shown = watched.page.inner_text(".sql")
    ran = subprocess.run(["bash", "-c", f"printf '%s\\0' {shown}"], capture_output=True, check=True, text=True)
    words = ran.stdout.split("\0")[:-1]
    assert len(words) == 4 and words[:2] == ["posttrain", "query"] and main(words[1:]) == 0
    assert "row" in capsys.readouterr().out


def test_keys_go_on_in_the_list_after_a_button_was_clicked(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address + "#/0/rollouts")
    page.click("button:has-text('longest')")
    page.wait_for_selector("button.on:has-text('longest')")
    page.wait_for_selector("tbody tr.sel")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector(".one .t.at")
    assert "/rollout/" in page.url


def test_a_run_that_goes_on_is_drawn_as_it_goes(browser: Any, folders: list[Path], tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(folders[0], copy, ignore=shutil.ignore_patterns("index", "step-000006*"))
    (copy / "run.json").write_text((copy / "run.json").read_text().replace('"end"', '"not yet"'))
    lock = Lock(copy)
    with served([copy]) as address:
        watched = Watched(browser)
        watched.page.goto(address + "#/0/rollouts?held=0")
        watched.page.wait_for_selector("text=320 rollouts")
        shutil.copy(folders[0] / "rollouts" / "step-000006.parquet", copy / "rollouts" / "step-000006.parquet")
        watched.page.wait_for_selector("text=384 rollouts")
        watched.page.goto(address + "#/0/overview")
        watched.page.wait_for_selector(".pill:text-is('on')")
        lock.release()  # as if it had been killed
        watched.page.reload()
        watched.page.wait_for_selector(".pill:has-text('cut off')")
        assert not watched.wrong
        watched.page.close()


def test_a_reply_of_many_tokens_makes_few_elements_and_scrolls(browser: Any, tmp_path: Path) -> None:
    run = generated_runs.make_run(tmp_path / "long", steps=1, groups=1, group=2, tokens=32_000, evals=0)
    with served([run]) as address:
        watched = Watched(browser)
        page = watched.page
        page.goto(address + "#/0/rollout/1/0")
        page.wait_for_selector(".t.at")
        assert page.locator(".t").count() < 8000
        first = page.evaluate("document.querySelector('.t.at').dataset.i")
        page.keyboard.press("ArrowRight")
        # The cursor is scrolled into view when it has moved: before that, the page would scroll back.
        until(page, f"![null, '{first}'].includes(document.querySelector('.t.at')?.dataset.i ?? null)")
        page.evaluate("document.querySelector('.tokens').scrollTo(0, 1e9)")
        until(page, "[...document.querySelectorAll('.chunk')].at(-1).querySelector('.t')")
        last = page.evaluate("[...document.querySelectorAll('.t')].at(-1).dataset.i")
        assert int(last) > 15_000 and not watched.wrong
        page.close()


def test_an_exported_file_opens_from_disk_and_asks_nobody(browser: Any, folders: list[Path], tmp_path: Path) -> None:
    [run] = opened([str(folders[0])])
    run.read()
    file = tmp_path / "run.html"
    file.write_bytes(exported(run, Selection(rollouts=100)))
    watched = Watched(browser, offline=True)
    page = watched.page
    page.goto(file.as_uri())
    page.wait_for_selector(".question .uplot")
    page.click("nav a:has-text('Rollouts')")
    page.wait_for_selector("text=100 rollouts")
    page.click("th button:has-text('reward')")
    until(page, "location.hash.includes('sort=-reward')")
    page.click("tbody tr >> nth=3")
    page.wait_for_selector(".one .t.at")
    page.keyboard.press("g")
    page.wait_for_selector(".replies .reply")
    assert watched.asked == [file.as_uri()] and not watched.wrong
    page.close()
