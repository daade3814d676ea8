"""Searched replies: rows as those of sample, the same for any company, within the budget, from kept state."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from items_place import ROWS, furnish, read
from row_files import refused
from safetensors.torch import load_file, save_file

import posttrain
from posttrain.cli.main import main
from posttrain.core.types import Completion, Invalid, Sampling, UserError
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.search.critic_value import CriticValue
from posttrain.engines.search.search_engine import SearchEngine, SearchPlan, step_end
from posttrain.engines.search.self_verification import SelfVerifier
from posttrain.engines.search.tree_search import SEARCHES, SearchSettings
from posttrain.envs.step_rewards import split_steps
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.critic import stored_critic
from posttrain.models.native.decoder import Decoder, causal
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.checkpoint import resolve
from posttrain.services.reward_model_service import RewardModelService
from posttrain.system import bounded_places
from posttrain.training.evaluated_model import UNVALUED
from posttrain.verify.answer import voted_answer

SEARCH: dict[str, Any] = {"step_delimiter": "e", "search_width": 2, "search_proposals": 2}
ALL = tuple(SEARCHES)


@pytest.fixture
def place(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path, tokenizer)
    return tmp_path


def sample(out: str, **options: Any) -> list[dict[str, Any]]:
    given: dict[str, Any] = {
        **{"model": "start", "samples": 1, "max_tokens": 12, "quiet": True, "env_workers": 0},
        **{"reward_model": ("reward",), **options},
    }
    posttrain.sample(given.pop("rows", "rows.jsonl"), out=out, **given)
    return read(out)


@pytest.mark.parametrize("delimiter", ["e", "/[aeiou]/"])
def test_the_same_file_for_any_number_of_slots_and_after_a_kill(place: Path, delimiter: str) -> None:
    options: dict[str, Any] = {**SEARCH, "search": ALL, "step_delimiter": delimiter}
    rows = sample("a.jsonl", **options)
    sample("b.jsonl", **options, slots=3)
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes()
    whole = Path("b.jsonl").read_text().splitlines(keepends=True)
    Path("b.jsonl").write_text("".join(whole[:3]) + whole[3][:20])
    sample("b.jsonl", **options, resume=True)
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes()
    alone = sample("c.jsonl", **{**options, "search": ("mcts",)}, rows=ROWS[3:4])
    assert alone[0]["responses"] == rows[3]["responses"][-1:]
    assert len({row["responses"][1] for row in rows}) > 1
    assert all("scores" not in row for row in rows)


@pytest.mark.parametrize("name", ALL)
def test_a_greedy_search_of_width_one_gives_the_greedy_reply(place: Path, name: str) -> None:
    greedy: dict[str, Any] = {"temperature": (0.0,), "max_tokens": 20}
    plain = sample("a.jsonl", **greedy, reward_model=())
    [(delimiter, _)] = Counter("".join(row["responses"][0][1:-1] for row in plain)).most_common(1)
    found = sample(
        "b.jsonl",
        **greedy,
        search=(name,),
        search_width=1,
        search_proposals=1,
        step_delimiter=delimiter,
        search_tokens=1000,
    )
    assert [row["responses"] for row in found] == [row["responses"] for row in plain]
    for row, other in zip(found, plain, strict=True):
        [course], [own] = row["samples"], other["samples"]
        assert (course["tokens"], course["stop"]) == (own["tokens"], own["stop"])
        assert course["mean_logp"] == pytest.approx(own["mean_logp"], abs=1e-5)
        assert course["search_tokens"] == course["tokens"] or name == "lookahead"


def test_what_each_search_found_is_told_and_a_budget_that_ends_before_a_reply_does(place: Path) -> None:
    searches = ("best-of-n", "beam")
    options: dict[str, Any] = {"step_delimiter": "e", "search_width": 2, "search_proposals": 2, "max_tokens": 36}
    found = posttrain.sample(
        "rows.jsonl", env="my.py:reward", model="start", out="a.jsonl", samples=1, quiet=True, env_workers=0,
        reward_model=("reward",), search=searches, search_tokens=9, **options,
    )  # fmt: skip
    for place_of, name in enumerate(searches):
        courses = [row["samples"][place_of] for row in found.rows()]
        n, whole = len(courses), sum(course["finished"] > 0 for course in courses)
        tokens, value = (sum(course[what] for course in courses) / n for what in ("search_tokens", "value"))
        (line, *more) = [note for note in found.notes if name in note]
        assert line.startswith(f"{name:<11} {whole} of {n} replies whole, {tokens:,.0f} tokens sampled for each")
        reward = sum(row["scores"][place_of] for row in found.rows()) / n
        assert f"value {value:.3f}, reward {reward:.3f}" in line
        small = f"--search-tokens ended {n - whole} of {n} searches of {name} before a whole reply: raise it"
        assert more == ([small] if whole < 0.9 * n else [])
    assert any("before a whole reply" in note for note in found.notes)


@pytest.mark.parametrize("aggregate", ["last", "min", "product", "mean"])
def test_the_value_of_a_reply_is_that_of_its_steps_by_the_reward_model(place: Path, aggregate: str) -> None:
    rows = sample("a.jsonl", **SEARCH, search=("best-of-n", "mcts"), step_aggregate=aggregate, max_tokens=36)
    model = RewardModelService("reward")
    checked = 0
    for row in rows:
        for text, course in zip(row["responses"], row["samples"], strict=True):
            if course["stop"] != "eos" or not (steps := split_steps(text, "e")):
                continue
            model.submit(0, {"prompt": row["prompt"], "steps": [step.text for step in steps]})
            [(_, scores)] = model.poll()
            odds = [1 / (1 + 2.718281828459045**-score) for score in scores]
            product = 1.0
            for one in odds:
                product *= one
            wanted = {"last": odds[-1], "min": min(odds), "product": product, "mean": sum(odds) / len(odds)}
            assert course["value"] == pytest.approx(wanted[aggregate], abs=1e-6)
            checked += len(steps) > 1 or aggregate == "product"  # which prefers a single step
    assert checked


def test_a_budget_is_spent_and_not_exceeded(place: Path) -> None:
    rows = sample("a.jsonl", **SEARCH, search=ALL, search_tokens=31)
    courses = [course for row in rows for course in row["samples"]]
    assert [course["search"] for course in rows[0]["samples"]] == list(ALL)
    assert max(course["search_tokens"] for course in courses) == 31
    rows = sample("b.jsonl", **{**SEARCH, "search_width": 50}, search=("best-of-n",), search_tokens=31)
    assert {course["search_tokens"] for row in rows for course in row["samples"]} == {31}


def test_the_width_changes_mcts_only_through_the_default_of_its_tokens(place: Path) -> None:
    def found(width: int, **options: Any) -> list[Any]:
        given = {**SEARCH, "search_width": width, **options}
        return [row["responses"] for row in sample("a.jsonl", **given, search=("mcts",), overwrite=True, max_tokens=36)]

    assert found(1, search_tokens=200) == found(6, search_tokens=200)
    assert found(1) != found(6)


def test_the_best_of_n_is_the_most_valued_of_the_replies_that_it_may_choose_from(place: Path) -> None:
    """One reply at a time has the same seeds: a search of more replies begins with those of fewer."""
    values = []
    for count in (1, 2, 4, 8):
        options = {**SEARCH, "search_width": count, "search_proposals": 1}
        rows = sample("a.jsonl", **options, search=("best-of-n",), overwrite=True, max_tokens=36)
        values.append([row["samples"][0]["value"] if row["samples"][0]["finished"] else 0.0 for row in rows])
    for fewer, more in pairwise(values):
        assert all(a <= b for a, b in zip(fewer, more, strict=True))
    assert values[0] != values[-1]


@torch.no_grad()
def said_yes(model: Decoder, tokenizer: Tokenizer, asked: str) -> float:
    """The probability of yes among both verdicts, by a plain forward for each word."""

    def probability(word: str) -> float:
        before, own = tokenizer.encode(asked, start=True), tokenizer.encode(word)
        if tokenizer.unknown_id in own:
            return 0.0
        tokens = torch.tensor([*before, *own])
        logits = model.logits(model(tokens, torch.arange(len(tokens)), causal)).double().log_softmax(-1)
        return float(logits[len(before) - 1 : -1].gather(-1, tokens[len(before) :, None]).sum().exp())

    yes, no = probability("Yes") + probability("yes"), probability("No") + probability("no")
    return yes / (yes + no)


def test_a_verified_reply_is_the_one_that_the_policy_itself_finds_right_with_the_highest_probability(
    place: Path, tokenizer: Tokenizer
) -> None:
    """Against plain forwards; a search of more replies begins with those of fewer."""
    model, values = load_model("start"), []
    assert isinstance(model, Decoder)
    how: dict[str, Any] = {"reward_model": (), "search": ("best-of-n",), "choose": "verified", "verify_question": "ok?"}
    for count in (1, 4, 16):
        how |= {"search_width": count, "search_proposals": 1, "overwrite": True, "max_tokens": 24}
        rows = [row for row in sample("a.jsonl", **how) if row["samples"][0]["finished"]]
        for row in rows:
            asked = f"{row['prompt']}{row['responses'][0]}\nok?\n"
            assert row["samples"][0]["value"] == pytest.approx(said_yes(model, tokenizer, asked), abs=1e-6)
            assert row["samples"][0]["search_tokens"] <= 24 * count, "a verdict samples nothing"
        values.append({row["id"]: row["samples"][0]["value"] for row in rows})
    for fewer, more in pairwise(values):
        assert all(value <= more[id] for id, value in fewer.items())
    assert values[1] != values[2] and len(values[0]) < len(values[2])
    steps = {**SEARCH, "search": ("mcts",), "reward_model": ("reward",), "search_tokens": 400, "stop": ("a",)}
    found = [row for row in sample("a.jsonl", **{**how, **steps}) if row["samples"][0]["finished"] > 1]
    for row in found:
        asked = f"{row['prompt']}{row['responses'][0]}\nok?\n"
        assert row["samples"][0]["value"] == pytest.approx(said_yes(model, tokenizer, asked), abs=1e-6)
    assert found, "the reward model led the search, and the policy chose"


def test_a_verdict_on_messages_is_asked_for_in_the_chat_template_and_read_in_both_spellings() -> None:
    tokenizer = Tokenizer.train(["YNyesno123+right?[]addu"], 64, "characters")
    chat = tokenizer.templated("{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}[a]", "a test")
    model = tiny(tokenizer)
    verifier = SelfVerifier(model, chat, "right?")
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1?"}]
    expected = said_yes(model, tokenizer, "[s]add[u]1+1?[a]2[u]right?[a]")
    assert verifier({"messages": messages}, "2") == pytest.approx(expected, abs=1e-6)
    assert verifier({"prompt": "1" * model.config.context}, "2") is None
    with pytest.raises(posttrain.UserError, match="lacks a token for part of 'Yes'"):
        SelfVerifier(model, Tokenizer.train(["no"], 8, "characters"), "right?")


def test_replies_without_room_for_the_question_lose_against_verified_ones_and_are_counted(
    place: Path, tokenizer: Tokenizer
) -> None:
    """A question that leaves room for short replies alone: the choice is the best of those that fit."""
    how: dict[str, Any] = {"reward_model": (), "search": ("best-of-n",), "search_width": 16, "search_proposals": 1}
    model, question = load_model("start"), "?" * 12
    context = model.config.context
    long = "say 1 " * (context // 3)
    task = {"id": "a", "prompt": tokenizer.decode(tokenizer.encode(long)[: context - 32])}
    asked = {**how, "max_tokens": 24, "choose": "verified", "verify_question": question, "overwrite": True}
    [row] = sample("a.jsonl", **asked, rows=[task])
    [course] = row["samples"]
    verifier = SelfVerifier(model, tokenizer, question)
    assert 0 < course["unverified"] < course["finished"]
    assert course["value"] == verifier({"prompt": task["prompt"]}, row["responses"][0])
    [row] = sample("a.jsonl", **{**asked, "verify_question": "?" * context}, rows=[task])
    [course] = row["samples"]
    assert course["unverified"] == course["finished"] > 0 == course["value"]
    found = posttrain.evaluate(
        [task], digits, "start", success=2.0, samples=2, k=(1,), env_workers=0,
        **{**how, "max_tokens": 24, "choose": "verified", "verify_question": "?" * context},
    )  # fmt: skip
    assert found.figures["unverified replies"]["mean"] > 0


@torch.no_grad()
def critic_of(folder: Path, tokens: Sequence[int]) -> list[float]:
    """V after each of these tokens, by a plain forward with the stored weights of the critic."""
    stored = load_file(folder / "training" / "critic.safetensors")
    model = load_model(folder)
    assert isinstance(model, Decoder)
    own = {name.removeprefix("backbone."): stored[name] for name in stored if name.startswith("backbone.")}
    if own:
        model.load_state_dict(own, strict=False)
    states = model(torch.tensor(tokens), torch.arange(len(tokens)), causal)
    found: list[float] = (states.double() @ stored["weight"].double() + stored["bias"].double()).tolist()
    return found


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_the_critic_of_a_run_values_partial_replies_as_a_plain_forward(
    place: Path, tokenizer: Tokenizer, kind: str
) -> None:
    posttrain.rl(
        "rows.jsonl", env="my.py:digits", model="start", out="run", algorithm="ppo", critic=kind, critic_lr=0.05, steps=3,
        prompts=2, group=2, max_tokens=8, lr=1e-3, env_workers=0, threads=1, quiet=True,
    )  # fmt: skip
    folder, checked = resolve("run"), 0
    own: dict[str, Any] = {**SEARCH, "model": "run", "reward_model": (), "search_value": "critic", "overwrite": True}
    searches = ("beam", "best-first", "mcts", "best-of-n")
    for row in sample("a.jsonl", **own, search=searches, max_tokens=24, search_tokens=300):
        prompt = tokenizer.encode(row["prompt"], start=True)
        for text, course in zip(row["responses"], row["samples"], strict=True):
            reply = tokenizer.encode(text)
            if course["stop"] == "eos" and len(reply) + 1 == course["tokens"]:
                assert course["value"] == pytest.approx(critic_of(folder, [*prompt, *reply])[-1], abs=1e-5)
                checked += 1
    assert checked > 3
    tokens = tokenizer.encode("say 1=1 2 3", start=True)
    policy = load_model(folder)
    value = CriticValue(stored_critic(folder, policy), policy)
    every = critic_of(folder, tokens)
    assert [value(tokens[:n], False) for n in (3, len(tokens))] == pytest.approx([every[2], every[-1]], abs=1e-5)
    assert value(tokens, True) == value(tokens[:-1], False)


def test_a_critic_that_is_not_there_or_values_no_states_is_refused(place: Path) -> None:
    how: dict[str, Any] = {**SEARCH, "search": ("beam",), "reward_model": (), "search_value": "critic"}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("has no critic (training/critic.safetensors): give a run", {}),
        ("--step-aggregate has no effect with --search-value critic", {"step_aggregate": "min"}),
        ("--choose weighted adds up probabilities", {"choose": "weighted"}),
        ("--reward-model has no effect with --search-value critic", {"reward_model": ("reward",)}),
        ("--search-value has no effect without --search", {"search": ()}),
    ]
    for message, options in cases:
        refused(partial(sample, "a.jsonl", **{**how, **options}), message)
    (place / "start" / "training").mkdir()
    file = place / "start" / "training" / "critic.safetensors"
    for names, message in (
        (("heads", "backbone.x"), "values actions, not states"),
        (("weight",), "is another model than the policy"),
    ):
        save_file({name: torch.zeros(2) for name in names}, file)
        refused(partial(sample, "a.jsonl", **how), message)


def test_searched_replies_are_scored_and_labelled_as_sampled_ones(place: Path) -> None:
    rows = sample("a.jsonl", **SEARCH, search=("beam",), samples=2, env="my.py:reward")
    assert all(len(row["scores"]) == len(row["responses"]) == 2 for row in rows)
    posttrain.label("a.jsonl", out="labelled.jsonl", best="best.jsonl")
    assert {row["prompt"] for row in read("best.jsonl")} == {row["prompt"] for row in rows}


class Counting:
    """Passes requests on, and counts tokens that are computed though they were kept."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine, self.batch_invariant, self.backend = engine, engine.batch_invariant, engine.backend
        self.sampled = 0
        self.asked: list[Sampling] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit(self, id: int, prompt: Sequence[int], sampling: Sampling, keep: bool = False) -> None:
        self.asked.append(sampling)
        self.engine.submit(id, prompt, sampling, keep)

    def poll(self) -> list[Completion]:
        done = self.engine.poll()
        self.sampled += sum(len(one.tokens) for one in done)
        return done


def test_steps_go_on_from_kept_state(tokenizer: Tokenizer) -> None:
    """The model computes the prompt once, and each sampled token at most once."""
    engine = LocalEngine(tiny(tokenizer, context=200), tokenizer, slots=4)
    counting = Counting(engine)
    plan = SearchPlan("beam", SearchSettings(2, 3), stop="e")

    def scorer(context: Any, reply: str, tell: Any) -> None:
        tell(len(set(reply)) / 100)

    search = SearchEngine(counting, tokenizer, engine.eos_ids, 200, plan, scorer)  # type: ignore[arg-type]
    prompt = tokenizer.encode("say 1=" * 8, start=True)
    search.submit_read(0, prompt, {"prompt": "say 1="}, Sampling(max_tokens=40, seed=3))
    done: list[Completion] = []
    while not done:
        done += search.poll()
    record = search.record(3)
    assert record is not None and record.expansions > 4 and record.spent == counting.sampled
    # more requests than slots may come to the prompt twice; each step's first request decodes its parent's last token
    assert engine.computed <= 2 * len(prompt) + 2 * counting.sampled
    assert not engine.kept.tokens and not engine.running


@pytest.mark.parametrize("delimiter", ["e", "/e/"])
def test_rollouts_are_greedy_and_what_an_expression_discards_is_short(tokenizer: Tokenizer, delimiter: str) -> None:
    engine = LocalEngine(tiny(tokenizer, context=64), tokenizer, slots=4)
    counting = Counting(engine)
    ends = {"expression": delimiter, "stop": ""} if delimiter == "/e/" else {"stop": delimiter}
    plan = SearchPlan("lookahead", SearchSettings(1, 2), 200, **ends)
    search = SearchEngine(counting, tokenizer, engine.eos_ids, 64, plan, lambda _, reply, tell: tell(0.5))  # type: ignore[arg-type]
    for id in range(5):
        search.submit(id, tokenizer.encode("say", start=True), Sampling(max_tokens=20, seed=id))
    done = 0
    while done < 5:
        done += len(search.poll())
    assert {own.temperature for own in counting.asked} == {0.0, 1.0}
    assert max(own.max_tokens for own in counting.asked) == (8 if delimiter == "/e/" else 20)


def test_tokens_that_an_expression_discards_are_spent(tokenizer: Tokenizer) -> None:
    """They were sampled: a budget counts them, though no reply has them."""
    engine = LocalEngine(tiny(tokenizer, context=200), tokenizer, slots=4)
    counting = Counting(engine)
    plan = SearchPlan("beam", SearchSettings(2, 2), None, "", "/[aeiou]/")
    search = SearchEngine(counting, tokenizer, engine.eos_ids, 200, plan, lambda _, reply, tell: tell(len(reply) / 99))  # type: ignore[arg-type]
    search.submit(0, tokenizer.encode("say", start=True), Sampling(max_tokens=40, seed=3))
    kept, step = list[int](), search._step

    def counted(*asked: Any) -> Any:
        found = step(*asked)
        kept.extend([len(found.tokens)] if found else [])
        return found

    search._step = counted  # type: ignore[method-assign]
    while not search.poll():
        pass
    record = search.record(3)
    assert record is not None and record.spent == counting.sampled > sum(kept)
    pieces = [own.seed for own in counting.asked]
    assert len(set(pieces)) == len(pieces) > len(kept), "a piece that continues a step draws numbers of its own"


@pytest.mark.parametrize("value", [0.5, Invalid("too long")])
def test_searches_that_are_cancelled_leave_nothing(tokenizer: Tokenizer, value: float | Invalid) -> None:
    engine = LocalEngine(tiny(tokenizer, context=64), tokenizer, slots=4)
    plan = SearchPlan("beam", SearchSettings(2, 2), stop="e")
    heard: list[Any] = []
    search = SearchEngine(engine, tokenizer, engine.eos_ids, 64, plan, lambda *asked: heard.append(asked[2]))
    search.submit(0, tokenizer.encode("say", start=True), Sampling(max_tokens=20))
    while not heard:
        search.poll()
    search.cancel(0)
    for tell in heard:
        tell(value)
    assert search.poll() == [] and not engine.running and not engine.kept.tokens


def test_a_step_ends_where_the_expression_first_matches_behind_text() -> None:
    delimiter = "/(?=Step [0-9])/"
    assert step_end("Step 1: a Step 2: b Step 3", delimiter) == 10
    assert step_end("Step 1: a", delimiter) is None
    assert step_end("\n\na\nb", "/\n/") == 4


def test_an_expression_that_never_ends_ends_a_search_in_one_line(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_places, "SECONDS", 0.2)
    slow: dict[str, Any] = {**SEARCH, "step_delimiter": "/(.|.)+(?!)/", "max_tokens": 40}
    for name in ("beam", "best-of-n"):
        with pytest.raises(
            UserError, match=r"--step-delimiter: its regular expression takes more than 0.2 s for a reply"
        ):
            sample(f"{name}.jsonl", **slow, search=(name,))


def test_answers_vote_by_what_they_end_with() -> None:
    assert voted_answer("1+1=2\n2+2=4") == voted_answer("1+3=4\nThe answer is 4.") == voted_answer(r"\boxed{4}") == "4"
    assert voted_answer("so 12 + 1 = 13.50") == voted_answer("The answer is 13.5.") == voted_answer("27/2")
    assert voted_answer(" Blue ") == "blue"
    assert voted_answer("<think>1 of 2</think>Blue") == voted_answer("<think>so 7</think> blue ") == "blue"
    assert voted_answer("1,000 and 250 make 1,250") == voted_answer("1000 + 250 = 1250") == "1250"


def test_contradicting_options_are_refused(place: Path) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("--search-width has no effect without --search", {"search_width": 3}),
        ("--search-exploration has no effect without --search mcts", {"search": ("beam",), "search_exploration": 2.0}),
        ("--reward-model FOLDER", {"search": ("beam",), "reward_model": ()}),
        ("--reward-model FOLDER", {"search": ("best-of-n",), "reward_model": ()}),
        ("--temperature 0", {"search": ("beam",), "temperature": (0.0,)}),
        ("not a regular expression", {"search": ("beam",), "step_delimiter": "/(/"}),
        ("not a regular expression", {"search": ("beam",), "step_delimiter": "/a{99999999999}/"}),
        ("--step-delimiter", {"search": ("beam",), "step_delimiter": "spans"}),
        ("--search has 'beam' twice", {"search": ("beam", "beam")}),
        ("search is one of", {"search": ("dfs",)}),
        ("several", {"search": ("beam",), "env": "my.py:twice"}),
        ("--top-k 1 proposes the same step", {"search": ("beam",), "top_k": 1}),
        (
            "--kinds.a.temperature 0 proposes",
            {"search": ("beam",), "kind": "prompt", "kinds": {"a": {"temperature": 0}}},
        ),
        ("--kinds.a.top-k 1 proposes", {"search": ("beam",), "kind": "prompt", "kinds": {"a": {"top_k": 1}}}),
        ("--judge has no effect with --search and without --env", {"search": ("beam",), "judge": ("judge.toml",)}),
        (
            "a second --reward-model has no effect with --search",
            {"search": ("beam",), "reward_model": ("process=reward", "other=reward")},
        ),
        ("--verify-question has no effect without --search", {"verify_question": "ok?"}),
        ("--verify-question has no effect without --choose verified", {"search": ("beam",), "verify_question": "ok?"}),
        (
            "--step-aggregate has no effect without --reward-model",
            {"search": ("best-of-n",), "choose": "majority", "reward_model": (), "step_aggregate": "min"},
        ),
    ]
    for message, options in cases:
        refused(partial(sample, "a.jsonl", **options), message)
    sample("a.jsonl", search=("best-of-n",), choose="majority", reward_model=())


# -- evaluation --------------------------------------------------------------------------------------------------------


def digits(task: Any, reply: str) -> float:
    return sum(c.isdigit() for c in reply) / (len(reply) + 1)


def evaluate(**options: Any) -> Any:
    given: dict[str, Any] = {**SEARCH, "samples": 2, "k": (1,), "max_tokens": 12, "env_workers": 0, "seed": 3}
    given |= {"reward_model": ("reward",), "search": ("beam",), **options}
    return posttrain.evaluate(ROWS[:3], digits, "start", success=2.0, **given)


def test_eval_scores_the_replies_that_a_search_finds_and_counts_their_tokens(place: Path) -> None:
    found, plain = (
        evaluate(search_tokens=40),
        evaluate(search=(), reward_model=(), step_delimiter="", search_width=4, search_proposals=4),
    )
    assert [r.reward for r in found.rollouts] == [pytest.approx(digits(None, r.text)) for r in found.rollouts]
    assert {r.text for r in found.rollouts} != {r.text for r in plain.rollouts}
    figure = found.figures["search tokens"]
    assert 12 < figure["mean"] <= 40 and figure["tasks"] == 3 and "search tokens" not in plain.figures
    again = evaluate(search_tokens=40, slots=2)
    assert [r.text for r in again.rollouts] == [r.text for r in found.rollouts]


def test_partial_replies_too_long_for_the_reward_model_lose_and_are_counted(
    place: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree("reward", "short")
    config = json.loads(Path("short/config.json").read_text())
    room = 6 + max(len(tokenizer.encode(row["prompt"], start=True)) for row in ROWS[:3])
    Path("short/config.json").write_text(json.dumps(config | {"max_position_embeddings": room}))
    heard: list[float | Invalid] = []
    hear = SearchEngine._hear
    monkeypatch.setattr(SearchEngine, "_hear", lambda self, *told: heard.append(told[-1]) or hear(self, *told))
    found = evaluate(reward_model=("short",))
    long = sum(isinstance(value, Invalid) for value in heard)
    assert 0 < long < len(heard) and found.figures[UNVALUED]["mean"] * len(found.rollouts) == pytest.approx(long)
    assert UNVALUED not in evaluate().figures
    rows = sample("a.jsonl", **SEARCH, search=("best-of-n",), reward_model=("short",), max_tokens=36)
    courses = [course for row in rows for course in row["samples"]]
    assert any(course.get("unvalued") for course in courses) and all(course["value"] >= 0 for course in courses)


def test_a_search_of_very_many_tokens_is_warned_of_before_it_begins(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begun(*how: Any, **more: Any) -> Any:
        raise posttrain.UserError("it would begin here")

    for verb in ("evaluate", "sample"):
        monkeypatch.setattr(f"posttrain.training.verbs.{verb}.open_playground", begun)
    large: dict[str, Any] = {"search": ("mcts",), "search_width": 1024, "search_proposals": 1024}
    began = "it would begin here"
    refused(lambda: evaluate(**large), began)
    assert "--search mcts may sample 12,582,912 tokens for each reply (--search-width x" in capsys.readouterr().err
    refused(lambda: evaluate(**large, search_tokens=10**5), began)
    assert "--search mcts may sample 100,000 tokens for each reply: --search-tokens" in capsys.readouterr().err
    refused(lambda: sample("a.jsonl", **SEARCH | large), began)
    assert "--search mcts may sample 12,582,912 tokens" in capsys.readouterr().err
    refused(lambda: evaluate(), began)
    assert "--search" not in capsys.readouterr().err


def test_a_search_whose_reward_model_scores_no_steps_ends_in_one_line(place: Path) -> None:
    shutil.copytree("reward", "pooled")
    config = json.loads(Path("pooled/config.json").read_text())
    Path("pooled/config.json").write_text(json.dumps(config | {"posttrain_pooling": "mean"}))
    refused(lambda: evaluate(reward_model=("pooled",)), "--search: a partial reply has no value", "cannot score steps")


def test_the_best_of_more_replies_has_a_higher_score_of_the_model_that_chose_it(place: Path) -> None:
    """The environment is the score of the same reward model, of the whole reply."""
    scores = []
    for number in (1, 4, 16):
        how = {"search": ("best-of-n",), "step_delimiter": "reply", "search_width": 1, "search_proposals": number}
        found = posttrain.evaluate(
            ROWS[:3], "reward-model", "start", reward_model=("reward",), samples=2, k=(1,), max_tokens=12, env_workers=0,
            success=99.0, **how,
        )  # fmt: skip
        scores.append(found.figures["reward"]["mean"])
        assert found.figures["search tokens"]["mean"] <= 12 * number
    assert scores[0] < scores[1] < scores[2]


def test_both_sides_of_a_comparison_search(place: Path) -> None:
    found = evaluate(against="start")
    assert found.against[0].figures["search tokens"] == found.figures["search tokens"]
    assert found.against[0].differences["reward"]["mean"] == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--search", "beam", "mcts"], "--search beam mcts: eval takes one search"),
        (
            ["--search", "beam", "--reward-model", "reward", "--step-weight", "2"],
            "--step-weight has no effect with --search",
        ),
        (["--search", "beam"], "--search needs what scores steps: --reward-model FOLDER"),
        (["--search-width", "2"], "--search-width has no effect without --search"),
        (
            ["--search", "beam", "--reward-model", "reward", "--temperature", "0"],
            "--temperature 0 proposes the same step",
        ),
        (
            ["--search", "beam", "--reward-model", "reward", "--step-delimiter", "spans"],
            "--search needs a --step-delimiter",
        ),
    ],
)
def test_a_search_that_eval_cannot_make_is_refused_in_one_line(
    place: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--tasks", "rows.jsonl", "--model", "start", "--env", "gsm8k", *words]
    assert main(["eval", *words]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1


def test_a_reward_model_of_a_search_is_no_environment(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tasks", "rows.jsonl", "--model", "start", "--search", "beam", "--reward-model", "reward"]
    assert main(["eval", *words]) == 2 and "--env is missing" in capsys.readouterr().err
