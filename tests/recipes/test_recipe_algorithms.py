"""recipes/algorithms.py: its tasks are fair, its settings exist, and its report says what was found."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from places import ROOT

from posttrain.algorithms.all_algorithms import find
from posttrain.algorithms.describe import COMMON_TASKS
from posttrain.config.resolve import filled, validate
from posttrain.config.training import RL, SFT
from posttrain.core.types import UserError
from posttrain.envs.builtin import arithmetic
from posttrain.envs.play.load_env import load_env
from posttrain.training.adjust import adjust


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))  # as when it is run as a script
    spec = importlib.util.spec_from_file_location("algorithms_recipe", ROOT / "recipes" / "algorithms.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


def result(row: str, seed: int, after: float) -> dict[str, Any]:
    return {
        **{"row": row, "seed": seed, "before": 0.6, "after": after, "interval": [after - 0.01, after + 0.01]},
        **{"seconds": 10.0, "steps": 20, "curve": [[0, 0.6], [10, 0.8], [20, after]], "settings": {}},
        **{"end": "2026-01-01T00:00:00+00:00", "git": {"revision": "0123456789", "dirty": False}},
        **{"versions": {"python": "3.11", "torch": "2.13"}, "machine": {"platform": "Linux", "cores": 2}},
    }


def test_demonstrators_forget_a_third_of_the_time_and_show_no_held_out_sum(recipe: ModuleType) -> None:
    sums = recipe.TASKS["sums"]
    practice = sums.practice(0)
    right = {t["prompt"]: t["answer"] for t in practice}
    rows = sums.demonstrations(practice, 0)
    assert not {r["prompt"] for r in rows} & {t["prompt"] for t in sums.unseen(0)}
    told = [r for r in rows if not r["prompt"].endswith("+0=")]  # forgetting a 0 changes nothing
    wrong = [r for r in told if r["response"] != right[r["prompt"]]]
    assert len(wrong) / len(told) == pytest.approx(1 / 3, abs=0.01)
    for row in wrong[:100]:
        short = row["prompt"].rstrip("=").rpartition("+")[0]
        assert arithmetic.reward({"answer": str(sum(map(int, short.split("+"))))}, row["response"]) == 1.0


def test_worked_sums_are_cut_off_by_the_budget_and_shown_by_no_held_out_task(recipe: ModuleType) -> None:
    worked = recipe.TASKS["worked-sums"]
    practice = worked.practice(0)
    rows = worked.demonstrations(practice, 0)
    assert not {r["prompt"] for r in rows} & {t["prompt"] for t in worked.unseen(0)}
    lengths = [len(r["response"]) + 1 for r in rows]  # a token a character, and the end
    too_long = sum(n > worked.common["max_tokens"] for n in lengths) / len(lengths)
    assert 0.3 < too_long < 0.7 and 20 <= sum(lengths) / len(lengths) <= 60
    assert max(lengths) + 11 <= worked.imitation["context"]


@pytest.mark.parametrize("name", ["sums", "worked-sums"])
def test_every_row_has_settings_that_exist(recipe: ModuleType, name: str) -> None:
    common = recipe.TASKS[name]
    assert set(common.own) <= set(recipe.TABLE)
    validate(SFT(tasks="x", **common.imitation))
    for row in recipe.TABLE:
        options = {**common.settings(row), "tasks": "x", "eval_tasks": ("x",), "model": "x", "algorithm": row}
        validate(filled(RL, options))
        load_env(options["env"])


@pytest.mark.parametrize("name", ["sums", "worked-sums"])
def test_every_variant_is_an_algorithm_with_options_that_exist_and_change_it(recipe: ModuleType, name: str) -> None:
    common = recipe.TASKS[name]
    assert not recipe.VARIANTS.keys() & recipe.TABLE.keys()

    def adjusted(of: str, row: str) -> Any:
        config = filled(RL, {**common.settings(of), "tasks": "x", "eval_tasks": ("x",), "model": "x", "algorithm": row})
        validate(config)
        return adjust(find(row), config)  # refuses what has no effect

    for of, variant in recipe.VARIANTS.items():
        assert common.settings(of) == {**common.settings(variant.row), **variant.options}
        assert adjusted(of, variant.row) != adjusted(variant.compared, variant.row), of


def test_variants_are_a_part_of_the_page_compared_with_their_algorithm_by_seed(
    recipe: ModuleType, tmp_path: Path
) -> None:
    found = {
        "ppo": {seed: result("ppo", seed, after) for seed, after in enumerate((0.95, 0.90))},
        "ppo-bootstrap": {seed: result("ppo-bootstrap", seed, after) for seed, after in enumerate((0.96, 0.93, 0.9))},
        "dapo-reward-floor": {1: result("dapo-reward-floor", 1, 0.9)},
    }
    sums = recipe.TASKS["sums"]
    whole = recipe.report(sums, found, tmp_path).read_text()
    assert "1 of 1 algorithms" not in whole and "0 of 1 algorithms end above 0.9" in whole  # variants do not count
    line = "| ppo-bootstrap | [ppo](../algorithms/ppo.md) `--bootstrap-truncated` | 0.960, 0.930, 0.900 "
    line += "| 0.930 [0.855, 1.005] | ppo | +0.020 [-0.107, +0.147] | 0 1 2 | 10 |"  # 12.706 * 0.01, of the two common seeds
    assert line in whole
    floor = (
        "| dapo-reward-floor | [dapo](../algorithms/dapo.md) `--reward-floor -1` | 0.900 | 0.900 | dapo |  | 1 | 10 |"
    )
    assert floor in whole and "--variants --task sums --seeds 0 1 2\n" in whole
    assert {path.stem for path in (tmp_path / "algorithms" / "curves").iterdir()} == {"ppo"}
    del found["dapo-reward-floor"]
    again = recipe.report_variants(sums, found, tmp_path).read_text()
    assert floor not in again and line in again and "0 of 1 algorithms" in again  # the other part is left alone
    with pytest.raises(UserError, match="no variant is finished"):
        recipe.report_variants(sums, {"ppo": found["ppo"]}, tmp_path)


def test_rows_may_name_variants_and_all_variants_bring_their_algorithms(
    recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(recipe, "run_all", lambda out, common, rows, *_: asked.append(list(rows)) or [])
    kept = tmp_path / "sums"
    for name in ("grpo", "grpo-kl-response"):
        folder = kept / name / "seed-0"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(result(name, 0, 0.9)))
    where = ["--out", str(tmp_path), "--docs", str(tmp_path / "docs")]
    for words in (["--rows", "grpo", "grpo-kl-response"], ["--variants"]):
        monkeypatch.setattr("sys.argv", ["algorithms.py", *words, *where])
        assert recipe.main() == 0
    assert asked[0] == ["grpo", "grpo-kl-response"]
    assert set(asked[1]) == {*recipe.VARIANTS, "ppo", "grpo", "reinforce++", "dapo"}
    page = (tmp_path / "docs" / "results" / "algorithms.md").read_text()
    assert page.count("| grpo-kl-response |") == 1 and "1 of 1" not in page and "0 of 1" in page


def test_the_report_has_every_task_seed_interval_and_learned_row(recipe: ModuleType, tmp_path: Path) -> None:
    found = {
        "grpo": {seed: result("grpo", seed, after) for seed, after in enumerate((0.95, 0.96, 0.97))},
        "rloo": {0: result("rloo", 0, 0.85)},
    }
    text = recipe.report(recipe.TASKS["sums"], found, tmp_path).read_text()
    other = recipe.report(recipe.TASKS["worked-sums"], {"rloo": found["rloo"]}, tmp_path).read_text()
    assert "| 0.950, 0.960, 0.970 | 0.960 [0.935, 0.985] |" in text  # 4.303 * 0.01 / sqrt(3) = 0.0248
    assert "1 of 2 algorithms end above 0.9 with every seed" in text and "1 of 1 algorithms end above 0.6" in other
    assert "--task worked-sums --seeds 0\n" in other
    curves = ("curves/grpo.png", "curves/rloo.png", "curves-worked-sums/rloo.png")
    assert {(folder, f"{name}.md") for folder, name in recipe.PLACES.values()} == {
        (folder, file) for folder, (_, file) in COMMON_TASKS.items()
    }
    for picture in ("results/algorithms.png", *(f"algorithms/{curve}" for curve in curves)):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_a_report_of_nothing_is_refused(recipe: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run is finished"):
        recipe.report(recipe.TASKS["sums"], {}, tmp_path)
