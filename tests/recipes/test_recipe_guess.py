"""What the recipe of guess-the-number imitates is what the environment shows and hears."""

from __future__ import annotations

import random

from recipe_modules import recipe_module
from scripted import scripted

from posttrain.envs.builtin.guess import guess

recipe = recipe_module("guess")


def test_demonstrations_are_games_as_the_environment_plays_them() -> None:
    rng = random.Random(0)
    for task in recipe.games(False)[:200]:
        guesses = recipe.careless(task, rng)
        played = scripted(guess, task, [f"{said}\n" for said in guesses], then=None)
        row = recipe.shown(task, guesses)
        texts = zip(played.texts, guesses, strict=False)
        assert row["prompt"] + row["response"] == "".join(f"{text}{said}\n" for text, said in texts)
        assert 0 < len(guesses) <= recipe.GUESSES and len(set(task["id"].split(" of "))) in (1, 2)


def test_a_held_out_game_is_in_no_demonstration_and_a_search_by_halves_finds_nearly_all() -> None:
    train, held_out = recipe.games(False), recipe.games(True)
    assert len(held_out) > 50 and not {t["id"] for t in train} & {t["id"] for t in held_out}
    assert all(recipe.LEAST <= task["limit"] <= recipe.LIMIT for task in [*train, *held_out])
    assert 0.9 < recipe.best(held_out) <= 1.0
