"""The recipe of search-qa: what is imitated is what is played, to the token; nothing held out is trained on."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
from recipe_modules import recipe_module
from retrieved import small_index
from scripted_engine import Scripted

from posttrain.config.resolve import filled, validate
from posttrain.config.training import RL, SFT
from posttrain.core.types import Sampling, UserError
from posttrain.envs.builtin.search_qa import SEARCH
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.episode import Episode
from posttrain.envs.play.load_env import load_env
from posttrain.envs.play.player import Player
from posttrain.envs.play.service_client import Services
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.services.retrieval.passage_index import PassageIndex, open_index
from posttrain.services.retriever import retriever
from posttrain.training.sources.demonstrations import demonstration_runner

QUESTIONS = [
    {
        "id": "a",
        "dataset": "squad",
        "question": "What lies on the Tiber",
        "answers": ["It", "Rome"],
        "gold_ids": ["rome"],
    },
    {
        "id": "b",
        "dataset": "popqa",
        "question": "Who wrote The Hobbit?",
        "answers": ["Tolkien"],
        "gold_ids": ["hobbit"],
    },
    {"id": "c", "dataset": "popqa", "question": "Who wrote The Hobbit?", "answers": ["Homer"], "gold_ids": ["hobbit"]},
]


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return recipe_module("search_qa")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> PassageIndex:
    return open_index(small_index(tmp_path_factory.mktemp("recipe") / "index"))


def test_settings_exist(recipe: ModuleType) -> None:
    for size in recipe.SIZES.values():
        shape = {name: getattr(size, name) for name in ("hidden", "layers", "heads", "vocab", "context")}
        validate(filled(SFT, {"tasks": "x", **shape, "steps": size.reading, "rows": size.rows, "mask": "all"}))
    for options in (recipe.SIZES["small"].searching, recipe.DIRECT):
        validate(filled(RL, {"tasks": "x", "model": "x", "env": recipe.named(options), "retriever": ("x",)}))
        load_env(recipe.named(options))


def test_what_is_imitated_is_what_is_played(recipe: ModuleType, index: PassageIndex) -> None:
    rows = recipe.imitation_rows(index, QUESTIONS, True, recipe.SIZES["small"])
    assert [row["replies"][1].split("<answer> ")[1] for row in rows] == ["It </answer>", "Tolkien </answer>"]
    assert len(recipe.imitation_rows(index, QUESTIONS, False, recipe.SIZES["small"])) == 3
    tokenizer = Tokenizer.train([SEARCH, *rows[0]["replies"], *(passage.contents for passage in index.passages)], 600)
    [task, _] = map(recipe.row_to_task, rows)
    with EnvPool(recipe.named(recipe.SIZES["small"].searching), workers=0) as pool, Services() as asking:
        asking.named["retriever"] = retriever(str(index.folder))
        engine = Scripted(tokenizer, rows[0]["replies"])
        [rollout] = Player(pool, engine, tokenizer, Sampling(), 4096, services=asking).play([Episode(task, "t", 0)])
        [([shown], reward)] = demonstration_runner(pool, tokenizer, [1], asking)(task)
    assert rollout.rewards["exact"] == rollout.rewards["form"] == reward == 1
    [played] = rollout.transcripts
    assert shown.tokens == played.tokens and shown.scored.tolist() == played.scored.tolist()
    said = tokenizer.decode([shown.tokens[place] for place in shown.scored.tolist()])
    assert said == "".join(rows[0]["replies"])


def test_made_up_questions_have_their_answer_in_the_passage(recipe: ModuleType, index: PassageIndex) -> None:
    told = (
        "In the year of 1868 the city was called Edo by all. Later the young Emperor Meiji named it anew, as is known."
    )
    contents = f'"T"\n{told}'
    drawn = {recipe.made_up(contents, random.Random(seed)) for seed in range(40)}
    assert drawn == {
        ("In the year of what the city was called Edo by all?", "1868"),
        ("In the year of 1868 the city was called what by all?", "Edo"),
        ("Later the young what named it anew, as is known?", "Emperor Meiji"),
    }
    long = recipe.made_up(f'"T"\n{"word " * 90}Edo {"word " * 90}.', random.Random(0))
    assert long is not None and len(long[0]) < recipe.LONGEST + 20 and " what " in long[0]
    assert recipe.made_up('"T"\nshort. nothing here', random.Random(0)) is None
    for row in islice(recipe.reading_rows(index, 0, recipe.SIZES["small"]), 40):
        assert row["prompt"].strip() and row["response"].strip()
    assert list(islice(recipe.reading_rows(index, 1, recipe.SIZES["small"]), 20)) == list(
        islice(recipe.reading_rows(index, 1, recipe.SIZES["small"]), 20)
    )


def test_nothing_held_out_is_trained_on(recipe: ModuleType, data: Path) -> None:
    train, held_out = recipe.questions(data / "retrieval", None)
    assert len(train) > 8000 and len(held_out) > 1500
    golds = [{gold for row in rows for gold in row["gold_ids"][:1]} for rows in (train, held_out)]
    assert not golds[0] & golds[1]
    assert {row["dataset"] for row in held_out} == {"squad", "popqa"}
    assert recipe.sample(held_out, 10) == recipe.sample(held_out[::-1], 10)


def test_what_is_done_is_not_done_again(recipe: ModuleType, tmp_path: Path) -> None:
    asked: list[tuple[str, object]] = []

    def work(out: str, how: dict[str, bool]) -> None:
        asked.append((Path(out).name, how))
        if len(asked) == 1:
            (Path(out) / "checkpoints" / "step-000001").mkdir(parents=True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recipe.Stages(tmp_path, {"seed": 0}).run("one", work)
    for _ in range(2):
        stages = recipe.Stages(tmp_path, {"seed": 0})
        assert stages.run("one", work) == str(tmp_path / "one")
        stages.run("two", work)
    assert asked == [("one", {"overwrite": True}), ("one", {"resume": True}), ("two", {"overwrite": True})]
    assert stages.seconds.keys() == {"one", "two"}
    with pytest.raises(UserError, match="other settings"):
        recipe.Stages(tmp_path, {"seed": 1})
