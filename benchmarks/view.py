"""How fast `posttrain view` answers: python benchmarks/view.py runs/demo/rl [--rounds 6]

A server is started as a person would start it, its modules compiled, and Debian's Chromium opens it. Measured are: the time
from the command to the page with its figures; the first contentful paint; filters, sorts, searches and openings of
rollouts, each from the change of the address until the answer is drawn; a reply of 32,000 tokens; the most memory that the
server held. Needs Chromium and Playwright.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import posttrain

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip
CHANGE = """async (hash) => {
  const shown = () => document.querySelector("[data-of]");
  const before = shown().dataset.of, begin = performance.now();
  location.hash = hash;
  while (shown().dataset.of === before || document.querySelector(".stale")) await new Promise(requestAnimationFrame);
  return performance.now() - begin;
}"""
OPEN = """async (hash) => {
  const begin = performance.now();
  location.hash = hash;
  while (!document.querySelector(".t.at")) await new Promise(requestAnimationFrame);
  return performance.now() - begin;
}"""
SCROLL = """async () => {
  const place = document.querySelector(".tokens"), times = [];
  let last = performance.now();
  for (let i = 0; i < 120; i++) {
    place.scrollBy(0, 180);
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    times.push(now - last);
    last = now;
  }
  return times;
}"""


@contextmanager
def started(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str, float]]:
    """A server: its process, its address, and when it was begun."""
    begin = time.perf_counter()
    words = [sys.executable, "-m", "posttrain", "view", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().split()[1], begin
    finally:
        process.terminate()
        process.wait()


def memory(process: subprocess.Popen[str]) -> float:
    """The most that it has held, in MB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def processor(process: subprocess.Popen[str]) -> tuple[float, float]:
    """Seconds of a processor so far: of the server, and of the browser with its driver. Load does not lengthen them."""
    children: dict[int, list[int]] = {}
    used: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
                used[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    own, waiting = 0.0, [os.getpid()]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child != process.pid:
                own += used[child]
                waiting.append(child)
    return used[process.pid], own


def until_read(page: Any, begin: float, progress: float = 1.0) -> float:
    """Seconds from the command until all figures of the overview stand there."""
    while True:
        [run] = page.evaluate("fetch('api/runs').then((answer) => answer.json())")["runs"]
        if run["progress"] >= progress and page.locator(".pill", has_text="rollouts").count():
            return time.perf_counter() - begin
        page.wait_for_timeout(20)


def questions(total_steps: int, random: random.Random) -> dict[str, list[str]]:
    """Kind -> queries of the page of rollouts."""
    step = str(random.randint(1, total_steps))
    word = f"{random.randint(0, 9)}+{random.randint(0, 9)}"
    return {
        "filter": [
            f"step={step}", "reward=0..0.5", f"length={random.randint(9, 11)}", "advantage=1..", f"step={step}..&reward=1",
            "ask=wrong&as=groups", "ask=once", "ask=lost&as=groups", "stop=length",
        ],
        "sort": [f"sort={s}" for s in ("-reward", "advantage", "-length", "text", "-sd", "prompt", "-step")],
        "search": [f"q={word}", f"q={word}%2B{random.randint(0, 9)}", f"q={random.randint(0, 36)}"],
    }  # fmt: skip


def interactions(
    page: Any, address: str, rounds: int, steps: list[int], process: subprocess.Popen[str]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Milliseconds of each kind; and of a processor, on average over all, with the histograms that follow."""
    chance, times = random.Random(0), dict[str, list[float]]()
    page.goto(address + "#/0/rollouts")
    page.wait_for_selector("tbody tr")
    page.wait_for_timeout(1000)
    before = processor(process)
    for _ in range(rounds):
        for kind, queries in questions(max(steps), chance).items():
            for query in queries:
                times.setdefault(kind, []).append(page.evaluate(CHANGE, f"#/0/rollouts?{query}"))
                page.wait_for_timeout(250)  # a person looks; its histograms are drawn meanwhile
    for _ in range(4 * rounds):
        place = f"#/0/rollout/{chance.choice(steps)}/{chance.randint(0, 500)}"
        page.evaluate("location.hash = '#/0/rollouts'")
        page.wait_for_selector("tbody tr")
        page.wait_for_timeout(250)
        times.setdefault("open", []).append(page.evaluate(OPEN, place))
    count = sum(map(len, times.values()))
    server, others = (1000 * (b - a) / count for a, b in zip(before, processor(process), strict=True))
    return times, {"server": round(server, 1), "browser": round(others, 1)}


def figures(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "n": len(values),
        "median": round(statistics.median(values), 1),
        "p95": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 1),
        "most": round(ordered[-1], 1),
        "within 100 ms": round(sum(v <= 100 for v in values) / len(values), 3),
    }


def start(browser: Any, folder: Path) -> float:
    """Seconds from a command to all figures."""
    with started(folder) as (_, address, begin):
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        page.goto(address)
        page.wait_for_selector(".question")
        found = until_read(page, begin)
        page.close()
    return round(found, 2)


def long_reply(browser: Any, folder: Path) -> dict[str, Any]:
    """A reply of 32,000 tokens with all its numbers."""
    import generated_runs

    run = generated_runs.make_run(folder, steps=1, groups=1, group=2, tokens=32_000, evals=0)
    with started(run) as (_, address, _):
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        page.goto(address + "#/0/rollouts")
        page.wait_for_selector("tbody tr")
        found = []
        for index in (0, 1, 0):
            page.evaluate("location.hash = '#/0/rollouts'")
            page.wait_for_selector("tbody tr")
            page.wait_for_timeout(500)
            found.append(page.evaluate(OPEN, f"#/0/rollout/1/{index}"))
        frames = page.evaluate(SCROLL)
        page.close()
    return {"opens, ms": [round(f) for f in found], "frames while scrolling, ms": figures(frames)}


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    compileall.compile_dir(Path(posttrain.__file__).parent, quiet=2)
    found: dict[str, Any] = {"cores": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg()}
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as temporary:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        browser.new_page().close()  # the browser's own start is not the server's
        found["all figures after, s, of several starts"] = sorted(start(browser, options.run) for _ in range(9))
        with started(options.run) as (process, address, begin):
            page = browser.new_page(viewport={"width": 1280, "height": 720})
            page.goto(address)
            page.wait_for_selector(".question")
            found["curves stand after, s"] = round(time.perf_counter() - begin, 2)
            found["all figures after, s"] = round(until_read(page, begin), 2)
            while not page.evaluate("fetch('api/runs').then((a) => a.json())")["runs"][0]["searchable"]:
                page.wait_for_timeout(50)
            found["texts held after, s"] = round(time.perf_counter() - begin, 2)
            paints = []
            for _ in range(5):
                page.reload()
                page.wait_for_selector(".question")
                paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            found["processor until then, s"] = round(processor(process)[0], 2)
            found["first contentful paint, ms"] = figures(paints)
            steps = [
                int(p) for p in page.evaluate("fetch('api/0/overview').then((a) => a.json())")["parts"] if p[-1] != "e"
            ]
            times, used = interactions(page, address, options.rounds, steps, process)
            found |= {f"{kind}, ms": figures(values) for kind, values in times.items()}
            found["together, ms"] = figures([value for values in times.values() for value in values])
            found["processor for each, ms"] = used
            found["memory, MB"] = round(memory(process))
            page.close()
        found |= long_reply(browser, Path(temporary) / "long")
        browser.close()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
