"""Mixtures: parts keep their own environments and limits, their shares are exact, and a resumed run repeats them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny

import posttrain
from posttrain.apps.show import summary_page
from posttrain.apps.show.run_summary import RunSummary
from posttrain.cli.main import main
from posttrain.config.mixture_options import parts_of, weights_of
from posttrain.config.resolve import filled, validate
from posttrain.config.training import RL
from posttrain.core.batch import Stats
from posttrain.core.types import Reply, Task, Turn, UserError
from posttrain.data.mixed_tasks import MixedTasks, part_of
from posttrain.data.tasks import to_tasks
from posttrain.envs.play.env_outputs import Done
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.mixed_pool import MixedPool
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.run_reading import read_metrics, read_run
from posttrain.training.held_out_check import overlap
from posttrain.training.sources.mixture import LearningProgress, Mixture
from posttrain.training.sources.task_order import Solved, SolveRate, TaskOrder, Uniform

SUMS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(9)]
WORDS = [{"prompt": f"word {i} ", "answer": "abc"[i % 3]} for i in range(6)]
ENVIRONMENTS = """
SUCCESS = 0.3


def digits(task, reply):
    return sum(c.isdigit() for c in reply) / (len(reply) + 1)


def dialogue(task):
    reply = yield task["prompt"]
    other = yield "again "
    return {"letters": sum(c.isalpha() for c in reply + other) / (len(reply + other) + 1)}
"""
PARTS: dict[str, dict[str, Any]] = {
    "sums": {
        "tasks": "sums.jsonl",
        "env": "envs.py:digits",
        "weight": 3,
        "max_tokens": 3,
        "prompt_template": "{prompt}?",
    },
    "words": {"tasks": "words.jsonl", "env": "envs.py:dialogue", "weight": 1, "max_tokens": 5},
}
RECIPE = """
[rl]
model = "start"
prompts = 4
group = 3
steps = 6
lr = 1e-2
held_out = 0.3
eval_every = 3
env_workers = 0
threads = 1
save_every = 1
keep = 9
health = "off"

[rl.mixture.sums]
tasks = "sums.jsonl"
env = "envs.py:digits"
weight = 3
max_tokens = 3
prompt_template = "{prompt}?"

[rl.mixture.words]
tasks = "words.jsonl"
env = "envs.py:dialogue"
weight = 1
max_tokens = 5
"""


def everything(place: int) -> bool:
    return True


def mixed() -> MixedTasks:
    return MixedTasks({"sums": to_tasks(SUMS), "words": to_tasks(WORDS)})


def config(**how: Any) -> RL:
    return filled(RL, {"model": "m", "mixture": PARTS, **how})


def test_tasks_of_parts_are_one_sequence_whose_ids_name_the_part() -> None:
    found = mixed()
    assert len(found) == 15 and found.ends == [9, 15]
    assert [part_of(task) for task in found] == ["sums"] * 9 + ["words"] * 6
    assert list(found) == [found[place] for place in range(15)] and found[-1] == found[14]
    assert found[3]["id"] == "sums/" + to_tasks(SUMS)[3]["id"] and found[3]["prompt"] == "3+1="
    assert found.where(9) == "row 1" and found.where(8) == "row 9"
    assert {part_of(task) for task in found.examples(2)} == {"sums", "words"}
    assert [len(part) for part in found.each()] == [9, 6] and len(found.first(7)) == 13
    assert part_of({"id": "sums/a/b"}) == "sums"


@pytest.mark.parametrize("weights", [(3.0, 1.0), (0.3, 0.7), (1.0, 1.0), (0.999, 0.001)])
def test_shares_of_parts_are_exact(weights: tuple[float, float]) -> None:
    total = sum(weights)
    shares = {name: weight / total for name, weight in zip(("sums", "words"), weights, strict=True)}
    found = Mixture({"sums": Uniform(9, 1), "words": Uniform(6, 2)}, [9, 15], shares)
    drawn = Counter[str]()
    for step in range(1, 60):
        places = [place for _, place in found.draw(5, everything, ())]
        drawn.update("sums" if place < 9 else "words" for place in places)
        assert all(abs(drawn[name] - shares[name] * 5 * step) < 1 for name in shares)
        stats = Stats()
        found.measure(stats)
        assert stats["mixture/sums/share"] == (sum(place < 9 for place in places), 5.0)
    again = Mixture({"sums": Uniform(9, 1), "words": Uniform(6, 2)}, [9, 15], shares)
    assert [place for _, place in again.draw(295, everything, ())][:3] and again.state() == found.state()


def test_tasks_within_a_part_come_in_its_own_order() -> None:
    found = Mixture({"sums": Uniform(9, 1), "words": Uniform(6, 2)}, [9, 15], {"sums": 0.5, "words": 0.5})
    places = [pair for _ in range(6) for pair in found.draw(4, everything, ())]
    assert [pair for pair in places if pair[1] < 9] == Uniform(9, 1).draw(12, everything)
    assert [(visit, place - 9) for visit, place in places if place >= 9] == Uniform(6, 2).draw(12, everything)
    with pytest.raises(UserError, match="none of 6 rows fits"):
        found.draw(4, lambda place: place < 9, ())


def by_progress(steps: list[dict[str, tuple[int, int]]], fixed: dict[str, float], floor: float) -> dict[str, float]:
    """The shares after these steps of (right, wrong) rollouts of each part, from all of them at once."""

    def rate(name: str, decay: float) -> float:
        own = [step[name] for step in steps if name in step][::-1]  # the last one first
        right, wrong = (sum(decay**age * seen[side] for age, seen in enumerate(own)) for side in (0, 1))
        return right / (right + wrong) if own else 0.0

    progress = {name: abs(rate(name, 0.8) - rate(name, 0.95)) for name in fixed}
    total = sum(progress.values())
    return {n: floor * fixed[n] + (1 - floor) * progress[n] / total if total else fixed[n] for n in fixed}


def test_shares_follow_the_change_of_solve_rates_above_a_floor() -> None:
    fixed = {"a": 0.5, "b": 0.3, "c": 0.2}
    found = LearningProgress(fixed, 0.1)
    history: list[dict[str, tuple[int, int]]] = []
    for step in range(30):
        assert found.shares() == pytest.approx(by_progress(history, fixed, 0.1)) and sum(
            found.shares().values()
        ) == pytest.approx(1)
        history.append(
            {"a": (8, 8), "b": (min(16, step), max(0, 16 - step)), "c": (step % 4, 1)}
        )  # steady, learned, noisy
        if step % 3 == 2:
            del history[-1]["c"]  # a step without results of a part changes nothing
        for name, (right, wrong) in history[-1].items():
            found.observe(name, [Solved(0, "x", right, 0), Solved(1, "y", 0, wrong)])
        found.observe("c", [])
    assert found.of("a") == 0 and found.shares()["a"] == pytest.approx(0.05), "half of the floor"
    forgotten = LearningProgress(fixed, 0.1)
    for right in [16] * 20 + [8] * 3:
        forgotten.observe("b", [Solved(0, "x", right, 16 - right)])
    assert forgotten.shares()["b"] == pytest.approx(0.93), "what is forgotten is practised too"


def test_parts_have_the_shares_of_each_step_exactly_and_no_arrears_when_these_change() -> None:
    found = LearningProgress({"a": 0.75, "b": 0.25}, 0.2)
    due = {"a": 0.0, "b": 0.0}
    for step in range(40):
        drawn = Counter(found.draw(7))
        due = {name: due[name] + 7 * share - drawn[name] for name, share in found.shares().items()}
        assert all(abs(amount) < 1 for amount in due.values())
        if step >= 20:
            found.observe("b", [Solved(0, "x", step - 20, 40 - step)])
        if step > 22:
            assert drawn["b"] in (6, 7), "from 0.25 to 0.85 at once, though never more in all steps before"


@pytest.mark.parametrize("changing", [False, True])
def test_mixture_goes_on_from_its_state_and_parts_see_their_own_results(changing: bool) -> None:
    def new() -> Mixture:
        parts = {part: MixedTasks({part: tasks}) for part, tasks in mixed().parts.items()}
        orders: dict[str, TaskOrder] = {part: SolveRate(own, 0, 0.2, 0.5, 2.0) for part, own in parts.items()}
        shares = {"sums": 0.6, "words": 0.4}
        return Mixture(orders, [9, 15], shares, LearningProgress(shares, 0.2) if changing else None)

    def play(found: Mixture, first: int, last: int) -> list[Any]:
        drawn = []
        for step in range(first, last):
            drawn.append(found.draw(5, everything, {2, 10}))
            places = sorted({place for _, place in drawn[-1]})
            found.observe([Solved(p, mixed()[p]["id"], (p + step) % 4, (p * step) % 3) for p in places])
        return drawn

    whole, begun, again = new(), new(), new()
    drawn = play(whole, 0, 12)
    play(begun, 0, 5)
    again.restore(json.loads(json.dumps(begun.state())))
    assert play(again, 5, 12) == drawn[5:] and again.state() == whole.state()
    words = whole.orders["words"]
    assert isinstance(words, SolveRate) and words.results.keys() <= set(range(6))
    damages: tuple[dict[str, Any], ...] = ({"drawn": {"sums": 1}}, {"parts": {}}, {"drawn": {"sums": -1, "words": 0}})
    if changing:
        progress = whole.state()["progress"]
        damages += ({"progress": {}}, {"progress": {**progress, "due": {"sums": 9.0, "words": 0.0}}})
        damages += ({"progress": {**progress, "results": {"sums": [[1, -1], [0, 0]], "words": [[0, 0], [0, 0]]}}},)
    for broken in damages:
        with pytest.raises((ValueError, LookupError, TypeError)):
            new().restore({**whole.state(), **broken})


def test_weights_are_given_or_follow_from_the_sizes() -> None:
    assert weights_of(config(), {"sums": 9, "words": 6}) == {"sums": 0.75, "words": 0.25}
    bare = {name: {k: v for k, v in own.items() if k != "weight"} for name, own in PARTS.items()}
    for temperature, expected in ((1.0, 9 / 13), (2.0, 3 / 5), (1e6, 0.5)):
        found = weights_of(config(mixture=bare, mixture_temperature=temperature), {"sums": 9, "words": 4})
        assert found["sums"] == pytest.approx(expected, abs=1e-5) and sum(found.values()) == pytest.approx(1)


def test_shares_are_finite_for_any_weight_and_temperature() -> None:
    bare = {name: {k: v for k, v in own.items() if k != "weight"} for name, own in PARTS.items()}
    for temperature in (1e-3, 1e-300):  # the powers themselves overflow
        found = weights_of(config(mixture=bare, mixture_temperature=temperature), {"sums": 9, "words": 4})
        assert found == {"sums": 1.0, "words": pytest.approx(0.0, abs=1e-300)}
    heavy = {name: {**own, "weight": "1e308"} for name, own in PARTS.items()}
    assert weights_of(config(mixture=heavy), {"sums": 9, "words": 6}) == {"sums": 0.5, "words": 0.5}


def test_parts_have_the_options_of_the_run_but_for_their_own() -> None:
    parts = parts_of(config(max_turns=7, max_tokens=99, env_timeout=3.0))
    assert [(own.tasks, own.env, own.max_tokens, own.max_turns) for own in parts.values()] == [
        ("sums.jsonl", "envs.py:digits", 3, 7),
        ("words.jsonl", "envs.py:dialogue", 5, 7),
    ]
    assert not any(own.mixture for own in parts.values())


TEMPLATE = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}[a]"


def test_a_part_is_shown_in_its_own_form(place: Path, tokenizer: Tokenizer) -> None:
    """Of three parts one is a message behind its own system text, one bare, and one as the run has it."""
    chat = tokenizer.templated(TEMPLATE, "a test")
    save_model(tiny(chat), place / "chat", chat)
    rows, env = {"tasks": "sums.jsonl", "env": "envs.py:digits"}, {"prompts": 3, "group": 2, "max_tokens": 3}
    parts = {"own": {**rows, "chat": True, "system": "add"}, "bare": {**rows, "chat": False}, "run": rows}
    how: dict[str, Any] = {"steps": 2, "lr": 1e-3, "env_workers": 0, "threads": 1, "quiet": True, "held_out": 0.3}
    posttrain.rl(
        model="chat", out="shown", mixture=parts, system="be", chat=True, eval_every=2, success=0.3, **env, **how
    )
    messages = {"own": ["add"], "bare": [], "run": ["be"]}  # before the prompt
    for held_out in (False, True):
        seen = read_rollouts(place / "shown", 2, held_out=held_out)
        assert {str(row["task"]).partition("/")[0] for row in seen} == set(parts)
        for row in seen:
            assert row["prompt"].split("\n")[:-1] == messages[str(row["task"]).partition("/")[0]]
    recorded = read_run(place / "shown")["chat"]
    assert recorded == {
        "on": True, "system": "be", "parts": {"own": {"on": True, "system": "add"}, "bare": {"on": False, "system": None}}
    }  # fmt: skip
    with pytest.raises(
        UserError, match="part own of the mixture: --mixture.own.system needs prompts in a chat template"
    ):
        posttrain.rl(model="start", out="x", mixture={"own": {**rows, "system": "add"}}, success=0.3, **env, **how)


def test_a_part_of_an_environment_with_text_of_its_own_takes_no_chat(place: Path, tokenizer: Tokenizer) -> None:
    chat = tokenizer.templated(TEMPLATE, "a test")
    save_model(tiny(chat), place / "chat", chat)
    words = {"tasks": "words.jsonl", "env": "envs.py:dialogue", "chat": True}
    parts = {"words": words, "sums": {"tasks": "sums.jsonl", "env": "envs.py:digits"}}
    with pytest.raises(UserError, match=r"--mixture\.words\.chat has no effect on the text that this environment"):
        posttrain.rl(model="chat", out="y", mixture=parts, steps=1, env_workers=0, quiet=True)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"mixture": {"a": {**PARTS["sums"], "chat": "perhaps"}}}, "--mixture.a.chat is true or false, not 'perhaps'"),
        ({"tasks": "x.jsonl"}, "--tasks and --mixture both give rows"),
        ({"mixture": {"a": {"env": "arithmetic"}}}, "--mixture.a.tasks is missing"),
        ({"mixture": {"a": {"tasks": "x.jsonl"}}}, "--mixture.a.env is missing"),
        ({"mixture": {"a/b": PARTS["sums"]}}, "--mixture.a/b: a part has a name without /"),
        (
            {"mixture": {"a": {**PARTS["sums"], "wieght": 2}}},
            "--mixture.a.wieght: not a setting of a part; did you mean",
        ),
        ({"mixture": {"a": {**PARTS["sums"], "weight": 0}}}, "--mixture.a.weight must be above 0, not 0"),
        ({"mixture": {"a": {**PARTS["sums"], "weight": "much"}}}, "--mixture.a.weight is a number, not 'much'"),
        ({"mixture": {"a": {**PARTS["sums"], "max_tokens": 0}}}, "--mixture.a.max_tokens must be above 0, not 0"),
        ({"mixture": {"a": {"tasks": "x", "env": "y"}, "b": PARTS["sums"]}}, "--mixture.a.weight is missing"),
        ({"mixture_temperature": 2.0}, "--mixture-temperature has no effect where parts have weights"),
        ({"mixture": {}, "tasks": "x", "env": "y", "mixture_temperature": 2.0}, "--mixture-temperature has no effect"),
        ({"curriculum": "stages", "curriculum_column": "level"}, "--curriculum stages needs one set of rows"),
        ({"mixture_floor": 0.3}, "--mixture-floor has no effect without --mixture-weights progress"),
        ({"mixture_floor": 0.2}, "--mixture-floor has no effect without --mixture-weights progress"),
        ({"mixture_weights": "progress", "mixture_floor": 0.0}, "--mixture-floor must be above 0"),
        (
            {"mixture": {}, "tasks": "x", "env": "y", "mixture_weights": "progress"},
            "--mixture-weights has no effect without --mixture",
        ),
    ],
)
def test_mixtures_that_make_no_sense_are_refused_in_one_line(change: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as refused:
        validate(config(**change))
    assert str(refused.value).startswith(told) and "\n" not in str(refused.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_each_episode_runs_in_the_environment_of_its_part(workers: int) -> None:
    def lengths(task: Task, reply: str) -> float:
        return float(len(reply))

    def asking(task: Task) -> Any:
        reply = yield f"{task['prompt']}first "
        other = yield Turn(text="second ")
        return float(len(reply) - len(other))

    with EnvPool(lengths, workers) as first, EnvPool(asking, workers) as second:
        pool = MixedPool({"sums": first, "words": second})
        pool.ready()
        assert not pool.single_turn and not pool.by_group and pool.pending == 0
        rewards: dict[int, float] = {}
        tasks = mixed()
        for id, place in enumerate((0, 9, 3, 12)):
            pool.start(id, tasks[place])
        seen: dict[int, list[str | None]] = {id: [] for id in range(4)}
        while len(rewards) < 4:
            for id, event in pool.poll(None):
                if isinstance(event, Done):
                    rewards[id] = float(event.reward)  # type: ignore[arg-type]
                else:
                    assert isinstance(event, Turn)
                    seen[id].append(event.text)
                    pool.send(id, Reply("abcd"[: 4 - len(seen[id])]))
        assert rewards == {0: 3.0, 1: 1.0, 2: 3.0, 3: 1.0}
        assert seen[1] == ["word 0 first ", "second "] and seen[2] == ["3+1="]
        pool.start(7, tasks[9])
        pool.poll(None)
        pool.drop(7)
        assert pool.pending == 0 and pool.poll(0.0) == []


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("mixture")
    save_model(tiny(tokenizer), folder / "start", tokenizer)
    for name, rows in (("sums", SUMS), ("words", WORDS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "envs.py").write_text(ENVIRONMENTS)
    (folder / "recipe.toml").write_text(RECIPE)
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder
    torch.set_num_threads(threads)


@pytest.mark.parametrize("more", ["", "--async-steps 1 --curriculum solve-rate"])
def test_run_of_a_mixture_keeps_shares_and_limits_and_a_resumed_one_repeats_it(place: Path, more: str) -> None:
    run = place / ("run" + more[2:7])
    words = ["rl", "--config", "recipe.toml", "--out", run.name, "--quiet", *more.split()]
    assert main(words) == 0
    whole = (run / "metrics.jsonl").read_bytes()
    for step in range(1, 7):
        rows = read_rollouts(run, step)
        parts = Counter(str(row["task"]).partition("/")[0] for row in rows)
        assert parts == {"sums": 9, "words": 3}, "three of four prompts, in groups of three"
        for row in rows:
            sums = str(row["task"]).startswith("sums/")
            assert row["prompt"].endswith("=?") if sums else row["prompt"].startswith("word ")
            own = [turn for turn in row["turns"] if turn["role"] == "sampled"]
            assert len(own) == (1 if sums else 2)
            assert all(turn["length"] <= (3 if sums else 5) for turn in own)
        figures = read_metrics(run)[step]
        for part in ("sums", "words"):
            rewards = [row["reward"] for row in rows if str(row["task"]).startswith(part)]
            assert figures[f"mixture/{part}/reward"] == pytest.approx(sum(rewards) / len(rewards))
            right = [reward >= 0.3 for reward in rewards]
            assert figures[f"mixture/{part}/accuracy"] == pytest.approx(sum(right) / len(right))
        assert figures["mixture/sums/share"] == 0.75
    last = read_metrics(run)[-1]
    held = read_rollouts(run, 6, held_out=True)
    for part in ("sums", "words"):
        rewards = [row["reward"] for row in held if str(row["task"]).startswith(part)]
        assert rewards and last[f"eval/mixture/{part}/reward"] == pytest.approx(sum(rewards) / len(rewards))
        assert last[f"eval/mixture/{part}/accuracy"] == pytest.approx(sum(r >= 0.3 for r in rewards) / len(rewards))
    assert last["eval/tasks"] == len({row["task"] for row in held})
    of_part = Counter(str(task).partition("/")[0] for task in {row["task"] for row in held})
    sizes = "\n".join(read_run(run)["sizes"])
    assert f"{len({row['task'] for row in held})} held out: sums {of_part['sums']}, words {of_part['words']} (" in sizes
    page = "\n".join(summary_page.page(RunSummary.read(run)))
    assert "rows in memory" not in page and "sums envs.py:digits, words envs.py:dialogue" in page
    for part in ("sums", "words"):
        assert f"{part} accuracy" in page and f"-> {last[f'eval/mixture/{part}/accuracy']:.3f}" in page
    for step in range(4, 7):
        shutil.rmtree(run / "checkpoints" / f"step-{step:06d}")
    assert main(["rl", "--out", run.name, "--resume", "--quiet"]) == 0
    assert (run / "metrics.jsonl").read_bytes() == whole


@pytest.mark.parametrize("ahead", [0, 1])
def test_shares_of_a_run_follow_from_the_results_before_and_a_resumed_one_repeats_them(place: Path, ahead: int) -> None:
    run = place / f"progress-{ahead}"
    more = ["--mixture-weights", "progress", "--mixture-floor", "0.3", "--async-steps", str(ahead)]
    assert main(["rl", "--config", "recipe.toml", "--out", run.name, "--quiet", *more]) == 0
    whole = (run / "metrics.jsonl").read_bytes()
    fixed, due = {"sums": 0.75, "words": 0.25}, {"sums": 0.0, "words": 0.0}
    history: list[dict[str, tuple[int, int]]] = []
    changed = False
    for step in range(1, 7):
        rows = read_rollouts(run, step)
        expected = Counter[str]()
        for _ in range(4):
            due = {name: due[name] + share for name, share in by_progress(history, fixed, 0.3).items()}
            name = max(due, key=lambda name: due[name])
            due[name] -= 1
            expected[name] += 3  # rollouts of a group
        drawn = Counter(str(row["task"]).partition("/")[0] for row in rows)
        assert drawn == expected and read_metrics(run)[step]["mixture/sums/share"] == drawn["sums"] / 12
        right = Counter(str(row["task"]).partition("/")[0] for row in rows if row["reward"] >= 0.3)
        history.append({name: (right[name], drawn[name] - right[name]) for name in drawn})
        changed |= drawn["sums"] != 9
    assert changed
    for step in range(4, 7):
        shutil.rmtree(run / "checkpoints" / f"step-{step:06d}")
    assert main(["rl", "--out", run.name, "--resume", "--quiet"]) == 0
    assert (run / "metrics.jsonl").read_bytes() == whole


def test_the_command_line_replaces_an_entry_of_a_recipes_table_and_keeps_the_others(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "tables.toml").write_text(
        '[rl.fields]\nprompt = "a"\nanswer = "b"\n[rl.settings]\n"surrogate.high" = 0.3\n"surrogate.low" = 0.1\n'
        + RECIPE
    )
    seen: list[RL] = []
    monkeypatch.setattr("posttrain.cli.training_commands.trained", lambda config: seen.append(config) or 0)
    (place / "tables.toml").write_text(
        (place / "tables.toml").read_text() + '[rl.mixture.words.fields]\nprompt = "p"\n'
    )
    given = "--mixture.words.fields.answer w --mixture.sums.weight 1 --mixture.words.max-tokens=7 --fields.prompt q"
    given += " --mixture.more.tasks m.jsonl"
    assert main(["rl", "--config", "tables.toml", *given.split(), "--set", "surrogate.high=0.5"]) == 0
    (found,) = seen
    texts = {name: {key: str(value) for key, value in own.items()} for name, own in PARTS.items()}
    assert found.mixture == {
        "sums": texts["sums"] | {"weight": "1"},
        "words": {
            **{k: v for k, v in texts["words"].items() if k != "max_tokens"},
            "max-tokens": "7",
            "fields": json.dumps({"answer": "w", "prompt": "p"}),
        },
        "more": {"tasks": "m.jsonl"},
    }
    assert found.fields == {"prompt": "q", "answer": "b"}
    assert found.settings == {"surrogate.high": "0.5", "surrogate.low": "0.1"}


def test_a_part_renames_columns_of_its_own_and_its_errors_name_its_options(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "asked.jsonl").write_text(
        "".join(json.dumps({"q": row["prompt"], "a": row["answer"]}) + "\n" for row in SUMS)
    )
    (place / "needs.py").write_text(
        "SUCCESS = 0.3\n\ndef reward(task, reply):\n    return float(task['final'] == reply)\n"
    )
    words = (
        "rl --model start --prompts 2 --group 2 --steps 1 --env-workers 0 --threads 1 --out columns --overwrite".split()
    )
    parts = "--max-tokens 999 --mixture.a.max-tokens 2 --mixture.b.max-tokens 2".split()
    parts += "--mixture.a.tasks words.jsonl --mixture.b.tasks asked.jsonl".split()
    named = "--mixture.b.fields.prompt q --mixture.b.fields.answer=a".split()
    assert main([*words, *parts, *named, "--env", "envs.py:digits"]) == 0
    out = capsys.readouterr().out
    assert "of at most 2 tokens" in out and "more than a reply can have" not in out
    assert {row["prompt"] for row in read_rollouts(place / "columns", 1) if row["task"].startswith("b/")} <= {
        row["prompt"] for row in SUMS
    }
    (place / "columns.toml").write_text(
        '[rl.mixture.a]\ntasks = "words.jsonl"\n[rl.mixture.b]\ntasks = "asked.jsonl"\n'
        'fields = { prompt = "q", answer = "a" }\n'
    )
    assert main([*words, "--env", "envs.py:digits", "--max-tokens", "2", "--config", "columns.toml"]) == 0
    capsys.readouterr()
    for more, said in (
        (
            [],
            "part b of the mixture: asked.jsonl:1: no prompt; the row has: q, a; name its column: --mixture.b.fields.prompt",
        ),
        (
            ["--fields.prompt", "q"],
            "words.jsonl:1: no column 'q'; the columns are: prompt, answer; name it with --mixture.a.fields.prompt COLUMN",
        ),
        (["--mixture.b.fields", "q"], "--mixture.b.fields renames columns: write --mixture.b.fields.prompt COLUMN"),
        (
            [*named, "--mixture.b.env", "needs.py:reward"],
            "part b of the mixture: the environment fails with every sample",
        ),
        (named, "; or give this part its own --mixture.a.env"),
    ):
        env = ["--env", "needs.py:reward"] if "or give" in said else ["--env", "envs.py:digits"]
        assert main([*words, *parts, *env, *more]) == 2
        error = " ".join(capsys.readouterr().err.split())
        assert said in error, error


@pytest.mark.slow
def test_mixture_of_several_processes_and_engines_samples_the_same_rollouts(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "rl --config recipe.toml --quiet --curriculum solve-rate --steps 4 --eval-every 0 --env-workers 1".split()
    assert main([*words, "--out", "one"]) == 0
    several = [*words, "--out", "two", "--processes", "2", "--replicas", "2"]
    monkeypatch.setattr("sys.argv", ["posttrain", *several])  # each process reads it
    assert main(several) == 0
    for step in range(1, 5):
        runs = (read_rollouts(place / out, step) for out in ("one", "two"))
        one, two = ([(row["group"], row["text"], row["reward"]) for row in rows] for rows in runs)
        assert one == two
    rates = [[row["curriculum/solve_rate"] for row in read_metrics(place / out)[1:]] for out in ("one", "two")]
    assert rates[0] == rates[1]


def test_command_line_names_parts_as_a_recipe_does_and_mistakes_are_one_line(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "rl --model start --prompts 2 --group 2 --steps 1 --env-workers 0 --threads 1 --quiet --out cli".split()
    parts = "--mixture.a.tasks sums.jsonl --mixture.a.env envs.py:digits --mixture.a.max-tokens 2".split()
    parts += ["--mixture.a.limit", "4", "--mixture.a.prompt-template", "{prompt}\\n"]
    other = "--mixture.b.tasks words.jsonl --mixture.b.env envs.py:digits --mixture.b.max-tokens 2".split()
    assert main([*words, *parts, *other]) == 0
    told = json.loads((place / "cli" / "run.json").read_text())
    assert all(row["prompt"].endswith("=\n") for row in read_rollouts(place / "cli", 1) if row["task"].startswith("a/"))
    assert told["inputs"].keys() >= {"mixture a tasks", "mixture a env", "mixture b tasks"}
    assert (overlap("cli", "sums.jsonl", 0.2, 0) or "").startswith("cli was trained on all of sums.jsonl")
    assert overlap("cli", "recipe.toml", 0.2, 0) is None
    mixture: dict[str, Any] = {
        "a": {
            "tasks": "sums.jsonl",
            "env": "envs.py:digits",
            "max_tokens": 2,
            "limit": 4,
            "prompt_template": "{prompt}\n",
        },
        "b": {"tasks": "words.jsonl", "env": "envs.py:digits", "max_tokens": 2},
    }
    how: dict[str, Any] = {"prompts": 2, "group": 2, "steps": 1, "env_workers": 0, "threads": 1, "quiet": True}
    run = posttrain.rl(model="start", mixture=mixture, out="python", **how)
    assert (run.path / "metrics.jsonl").read_bytes() == (place / "cli" / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    for more, said in (
        (
            [*parts, "--mixture.b.tasks", "none.jsonl", "--mixture.b.env", "envs.py:digits"],
            "part b of the mixture: there is no",
        ),
        (
            [*parts, "--mixture.b.tasks", "words.jsonl", "--mixture.b.env", "arithmetic"],
            "different rewards for a right reply (a 0.3, b 1): set one with",
        ),
    ):
        assert main([*words, *more, "--overwrite"]) == 2
        error = capsys.readouterr().err
        assert said in error and len(error.strip().splitlines()) == 1
    changed = (place / "words.jsonl").read_text()
    (place / "words.jsonl").write_text(changed + json.dumps({"prompt": "word 9 ", "answer": "a"}) + "\n")
    assert main(["rl", "--out", "cli", "--resume", "--quiet", "--steps", "2"]) == 2
    assert "--mixture words.jsonl changed since the run began" in capsys.readouterr().err
    (place / "words.jsonl").write_text(changed)
