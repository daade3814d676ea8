"""A chat whose replies are scored: services answer in it as in a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import CHATML, tiny
from endpoints import replied, serving, write_recipe
from reward_models import write_reward_model

from posttrain.cli.main import main
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.services.reward_model_service import RewardModelService

TYPED = ("1+2=", "3+4=")
GREEDY = ("--temperature", "0", "--max-tokens", "5")


@pytest.fixture
def place(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a policy and a reward model, and a person who types two lines."""
    monkeypatch.chdir(tmp_path)
    save_model(tiny(tokenizer, context=512), tmp_path / "start", tokenizer)
    write_reward_model(tmp_path / "reward", tiny(tokenizer, context=512, seed=5), tokenizer, offset=0.5)
    typed = iter([*TYPED, ""])
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    return tmp_path


def score(folder: Path, content: Any) -> float:
    service = RewardModelService(folder)
    service.submit(0, content)
    [(_, found)] = service.poll()
    assert isinstance(found, float)
    return found


@pytest.mark.parametrize("template", [None, CHATML])
def test_reward_models_and_judges_score_each_reply_to_all_that_was_said_before(
    place: Path, capsys: pytest.CaptureFixture[str], template: str | None
) -> None:
    if template:
        for folder in ("start", "reward"):
            (place / folder / "chat_template.jinja").write_text(template)
    with serving() as server:
        write_recipe(place / "judge.toml", server.address)
        words = ["chat", "start", "--reward-model", "mine=reward", "--judge", "judge.toml"]
        assert main([*words, *GREEDY, *(("--system", "Be brief.") if template else ()), "--device", "cpu"]) == 0
        replies = [reply for request in server.asked for reply in replied(request)][-2:]
    printed = capsys.readouterr().out
    assert re.findall(r"\(judge: (.+)\)", printed) == [f"{1 + min(9, len(reply))}" for reply in replies]
    if template:
        system = {"role": "system", "content": "Be brief."}
        users = [{"role": "user", "content": text} for text in TYPED]
        said = [{"role": "assistant", "content": reply} for reply in replies]
        asked: list[Any] = [
            {"messages": [system, users[0], said[0]]},
            {"messages": [system, users[0], said[0], users[1], said[1]]},
        ]
    else:
        asked = [
            {"prompt": TYPED[0], "response": replies[0]},
            {"prompt": TYPED[0] + replies[0] + TYPED[1], "response": replies[1]},
        ]
    asked = [{**content, "cut": True} for content in asked]  # no reply ends within five tokens
    scores = [float(found) for found in re.findall(r"\(mine: (.+)\)", printed)]
    assert scores == pytest.approx([score(place / "reward", content) for content in asked], rel=1e-3)
    assert scores[0] != scores[1]


def test_what_a_service_cannot_answer_is_said_and_the_chat_goes_on(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as server:
        write_recipe(place / "judge.toml", server.address, kind="pairwise")
        assert main(["chat", "start", "--judge", "judge.toml", *GREEDY]) == 0
    assert capsys.readouterr().out.count("(judge: no answer, a pairwise judge is asked with") == len(TYPED)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--reward-model", "start"], "has no score head"),
        (["--reward-model", "reward", "reward"], "two services have the name 'reward-model'"),
        (["--judge", "nowhere.toml"], "nowhere.toml"),
        (["--temperature", "-1"], "--temperature"),
        (["--max-tokens", "0"], "--max-tokens"),
    ],
)
def test_chat_refuses_what_cannot_work_in_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert main(["chat", "start", *words]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1
