"""The page on built-in environments and bridges: its blocks run, and its episodes go as it shows them."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, blocks, run
from scripted import Scripted, scripted, scripted_async

from posttrain.envs.play.load_env import BUILTIN, is_async, is_generator_env, lift, load_converter, load_env

PAGE = ROOT / "docs" / "guides" / "environments-built-in.md"
TEXT = PAGE.read_text(encoding="utf-8")
EPISODE = re.compile(r"<!-- episode: (\S+) (\S+) (\d+) -->\n```text\n(.*?)\n```", re.DOTALL)
ELSEWHERE = {"code", "code-all", "code-choice", "python", "search-qa"}  # on pages of their own
NOT_HERE = {
    "arithmetic",
    "gsm8k",
    "math",
    "verdict",
    "word-problems",
    "reward-model",
    "judge",
    "unscored",
    *ELSEWHERE,
}  # or another


@pytest.mark.long
@pytest.mark.timeout(600)  # some 10 seconds of one core, which a busy machine does not have at once
def test_every_block_runs_and_every_episode_goes_as_it_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.1)
    before = set(sys.modules)
    assert sum(map(run, blocks(PAGE))) == 27
    episodes = EPISODE.findall(TEXT)
    assert len(episodes) == 12
    for spec, rows, number, text in episodes:
        assert shown(spec, Path(rows), int(number), text) == text, spec
    for made in set(sys.modules) - before:
        if str(getattr(sys.modules[made], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[made]


def test_table_names_every_environment_that_is_built_in_and_links_lead_to_their_sections() -> None:
    assert {name for name in BUILTIN if f"[`{name}`](#" in TEXT} == set(BUILTIN) - NOT_HERE
    headings = {
        re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", TEXT)) <= headings
    for path in re.findall(r"\]\(([\w/.+-]+\.md)(?:#[\w-]+)?\)", TEXT):
        assert (PAGE.parent / path).exists(), path


TRL = "benchmarks/peers/requirements-trl.txt"  # the comparison with TRL's own episodes, a command of its own


def test_the_table_of_bridges_names_the_versions_that_the_tests_run_with() -> None:
    pinned = {
        name.lower().replace("_", "-"): version
        for file in ("constraints.txt", "constraints-openenv.txt", "constraints-verifiers.txt", TRL)
        for name, version in re.findall(r"^([\w.-]+)==(\S+)", (ROOT / file).read_text(), re.MULTILINE)
        if file in ("constraints.txt", TRL) or name in ("openenv-core", "verifiers")
    }
    told = {
        name.lower(): cell
        for name, cell in re.findall(r"^\| \[([\w-]+)\]\([^)]*\) \| ([0-9.]+) \|", TEXT, re.MULTILINE)
    }
    assert len(told) == 7
    assert told == {name: pinned["openenv-core" if name == "openenv" else name] for name in told}
    for name in ("openai", "anthropic"):
        assert f"{name} {pinned[name]}" in TEXT


def shown(spec: str, rows: Path, number: int, text: str) -> str:
    """The episode of that row with the replies that the page shows, as it would show it."""
    row = json.loads(rows.read_text().splitlines()[number - 1])
    task = (load_converter(spec) or dict)(row)
    assert task is not None
    env = load_env(spec)
    replies = re.findall("\u00ab(.*?)\u00bb", text, re.DOTALL)
    played = (
        asyncio.run(closed(env, task, replies)) if is_async(env) else scripted(whole(env), task, replies, then=None)
    )
    assert played.done is not None
    earned = {side: done.reward for side, done in played.done.sides.items()} or {"reward": played.reward}
    return f"{played.script()}{', '.join(f'{name} {value:g}' for name, value in earned.items())}"


def whole(env: Any) -> Any:
    return env if is_generator_env(env) else lift(env)


async def closed(env: Any, task: Any, replies: list[str]) -> Scripted:
    """With the server ended within this event loop."""
    played = await scripted_async(env, task, replies, then=None)
    await env.server.close()
    return played
