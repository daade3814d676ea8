"""A checkpoint as a judge: an answer follows from its question alone, rubbish is no vote, mistakes are told in a line."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHATML, tiny
from items_place import read, write

import posttrain
from posttrain.cli.main import main
from posttrain.core.types import Invalid, Reasoned, Reply, StopReason, UserError, bare
from posttrain.envs.builtin.judge_verdict import reward
from posttrain.envs.play.answer_journal import ANSWERS
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder import Decoder, causal
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.native.kernels import build
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.run_reading import rollout_steps
from posttrain.services.generative_judge import GenerativeJudge
from posttrain.services.judge_recipe import Generative, generative_of, read_recipe
from posttrain.verify.verdict import final_score, final_verdict

CONTENTS = [{"prompt": f"say {a}", "response": b} for a in "abc" for b in ("yes", "no", "a longer one")]
TEMPLATE = "{prompt} {response} "
LETTERS = "0123456789+-*/= .abcdefghijklmnopqrstuvwxyz<>|"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A judge that has learned to say a letter or two and a verdict, which depends on chance."""
    folder = tmp_path_factory.mktemp("judge")
    said = ["so it is. verdict: yes", "verdict: no", "hm. verdict: no", "abc. verdict: yes", "I cannot say"]
    draw = random.Random(0)
    others = [  # what an untrained policy may say
        {"prompt": f"say {draw.choice('abc')}", "response": "".join(draw.choices(LETTERS, k=draw.randrange(10)))}
        for _ in range(100)
    ]
    rows = [
        {"prompt": TEMPLATE.format(**content), "response": said[i % len(said)]}
        for i, content in enumerate([*others, *CONTENTS, *CONTENTS, *CONTENTS])
    ]
    run = posttrain.sft(
        rows, out=str(folder / "run"), tokenizer="characters", hidden=32, layers=1, heads=2, context=64, epochs=25,
        rows=12, lr=1e-2, threads=1, quiet=True,
    )  # fmt: skip
    assert run.checkpoint is not None
    return Path(run.checkpoint)


def judge_of(folder: Path, **settings: Any) -> GenerativeJudge:
    given = {"model": str(folder), "template": TEMPLATE, "votes": 4, "temperature": 1.0, "max_tokens": 30, **settings}
    return GenerativeJudge(generative_of(given, "judge.toml: "))


def asked(judge: GenerativeJudge, contents: list[Any], between: int = 0) -> list[Any]:
    """The answers, in the order of the questions. `between`: how often it is polled between two questions."""
    answers: dict[int, Any] = {}
    for id, content in enumerate(contents):
        judge.submit(id, content)
        for _ in range(between):
            answers |= dict(judge.poll())
    while len(answers) < len(contents):
        answers |= dict(judge.poll())
    return [bare(answers[id]) for id in range(len(contents))]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("answer", ["share", "probability"])
def test_an_answer_follows_from_its_question_whatever_is_asked_beside_it(
    trained: Path, compiled: bool, answer: str
) -> None:
    build.use(compiled)
    try:
        together = asked(judge_of(trained, answer=answer), CONTENTS)
        assert len({a for a in together if not isinstance(a, Invalid)}) > 2
        assert asked(judge_of(trained, answer=answer), CONTENTS[::-1])[::-1] == together
        assert asked(judge_of(trained, answer=answer), CONTENTS, between=3) == together
        assert [asked(judge_of(trained, answer=answer), [content])[0] for content in CONTENTS[:3]] == together[:3]
        assert asked(judge_of(trained, answer=answer, slots=3), CONTENTS) == together
        assert asked(judge_of(trained, answer=answer, seed=1), CONTENTS) != together
    finally:
        build.use(True)


def test_every_vote_is_told_with_the_answer(trained: Path) -> None:
    judge = judge_of(trained)
    judge.submit(0, CONTENTS[0])
    while not (answers := judge.poll()):
        pass
    ((_, found),) = answers
    assert isinstance(found, Reasoned) and len(found.said) == 4 and all(found.said)
    votes = [final_verdict(text, judge.recipe.marker, judge.recipe.words) for text in found.said]
    readable = [vote for vote in votes if vote is not None]
    assert isinstance(found.answer, Invalid) or found.answer == pytest.approx(sum(readable) / len(readable))


def test_the_share_is_that_of_the_readable_votes_and_tokens_are_counted(trained: Path) -> None:
    judge = judge_of(trained, votes=20)
    answers = asked(judge, CONTENTS)
    counts = judge.counts()
    valid = [a for a in answers if not isinstance(a, Invalid)]
    assert valid and all(0 <= a <= 1 for a in valid) and any(0 < a < 1 for a in valid)
    assert counts["asked"] == len(CONTENTS) and counts["votes"] == 20 * len(CONTENTS)
    assert counts["tokens/prompt"] == sum(len(TEMPLATE.format(**c)) for c in CONTENTS)  # characters
    assert counts["votes"] < counts["tokens/reply"] <= 30 * counts["votes"]
    assert 0 < counts["unreadable"] < counts["votes"]


def test_the_probability_is_that_of_the_words_behind_the_reasons(trained: Path) -> None:
    """Against plain forwards of whole texts: the mean over the votes that can be read."""
    judge = judge_of(trained, answer="probability", votes=12)
    model, tokenizer = load_model(trained), Tokenizer.load(trained)
    assert isinstance(model, Decoder)
    prompt = tokenizer.encode(TEMPLATE.format(**CONTENTS[0]), start=True)
    judge.submit(0, CONTENTS[0])
    answers = judge.poll()
    [(question, _), *_] = judge._running.values()
    while not answers:
        answers = judge.poll()
    expected = []
    for completion in question.votes.values():
        before, marker, word = completion.text.rpartition("verdict: ")
        if word not in ("yes", "no"):
            continue
        told = [*prompt, *tokenizer.encode(before + marker)]
        logp = [likelihood(model, told, tokenizer.encode(one)) for one in ("yes", "no")]
        expected.append(torch.stack(logp).softmax(0)[0].item())
    assert len(expected) >= 6 and len({round(p, 3) for p in expected}) > 1
    assert bare(answers[0][1]) == pytest.approx(sum(expected) / len(expected), abs=1e-5)


@torch.no_grad()
def likelihood(model: Decoder, before: list[int], word: list[int]) -> torch.Tensor:
    tokens = torch.tensor([*before, *word])
    logits = model.logits(model(tokens, torch.arange(len(tokens)), causal)).log_softmax(-1)
    return logits[len(before) - 1 : -1].gather(-1, tokens[len(before) :, None]).sum()


def test_rubbish_and_replies_that_are_cut_off_are_invalid(trained: Path, tmp_path: Path) -> None:
    known = Tokenizer.load(trained)
    save_model(tiny(known), tmp_path / "untrained", known)
    answers = asked(judge_of(tmp_path / "untrained"), CONTENTS)
    assert all(isinstance(a, Invalid) and "no verdict in 4 of 4 replies" in a.reason for a in answers)
    cut = asked(judge_of(trained, max_tokens=12), [CONTENTS[0]] * 1)[0]
    assert isinstance(cut, Invalid) and "was cut off after 12 tokens" in cut.reason


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (7, "a scalar judge is asked with"),
        ("text", "the template shows {prompt}, and the question has none"),
        ({"prompt": "x" * 60, "response": "a"}, "63 tokens, with no room for the verdict"),
        ({"prompt": "p", "response": "\ud800"}, "cannot be read"),
    ],
)
def test_what_cannot_be_asked_is_invalid_and_costs_no_sampling(trained: Path, content: Any, told: str) -> None:
    judge = judge_of(trained)
    [answer] = asked(judge, [content])
    assert isinstance(answer, Invalid) and told in answer.reason, answer
    assert judge.counts()["invalid"] == 1 and judge.counts()["votes"] == 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"template": "{prompt}"}, "template has no place {response}"),
        ({"template": "{promt} {response}"}, "place {promt}; give {prompt}, {response} or {reference}"),
        ({"template": "{response"}, "template: "),
        ({"template": "{response:>3}"}, "takes no format"),
        ({"model": "nowhere"}, "model nowhere: no such folder"),
        ({"votes": 3, "temperature": 0.0}, "are all the same"),
        ({"words": ["yes", "YES"]}, "the good one first"),
        ({"marker": " "}, "marker is empty"),
        ({"scale": [5, 1]}, "lowest score, then the highest"),
        ({"scale": [1, 5], "answer": "probability"}, "scale does not go with words and answer"),
        ({"stop": ""}, "stop has an empty string"),
        ({"vots": 3}, "did you mean 'votes'"),
        ({"marker": "Urteil: ß"}, "can never produce 'Urteil: ß yes'"),
        ({"max_tokens": 5}, "max_tokens 5 ends every reply before its verdict, which has 11 tokens"),
        ({"template": "x" * 60 + "{response}"}, "a context of 64 tokens, and the template alone has 60"),
        ({"chat": True}, "has no chat template"),
    ],
)
def test_a_mistake_is_told_in_one_line(trained: Path, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as refusal:
        judge_of(trained, **settings)
    assert told in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_chat_judge_reads_the_template_as_the_users_message(trained: Path, tmp_path: Path) -> None:
    known = Tokenizer.load(trained)
    chat = Tokenizer(known.backend, known.config, CHATML)
    save_model(tiny(chat, context=128), tmp_path / "chat", chat)
    judge = judge_of(tmp_path / "chat", chat=True)
    shown = chat.render([{"role": "user", "content": TEMPLATE.format(**CONTENTS[0])}])
    judge.submit(0, CONTENTS[0])
    assert judge._waiting[0].tokens == chat.encode(shown, start=True)


def test_scores_are_read_within_their_scale(trained: Path, tmp_path: Path) -> None:
    rows = [{"prompt": TEMPLATE.format(**content), "response": "fine. score: 7"} for content in CONTENTS]
    run = posttrain.sft(
        rows, model=str(trained), out=str(tmp_path / "run"), epochs=60, rows=9, lr=1e-2, threads=1, quiet=True,
        overwrite=True,
    )  # fmt: skip
    assert run.checkpoint is not None
    scale = {"marker": "score:", "votes": 1, "temperature": 0.0}
    assert asked(judge_of(run.checkpoint, scale=[1, 10], **scale), CONTENTS[:2]) == [7.0, 7.0]
    assert isinstance(asked(judge_of(run.checkpoint, scale=[1, 5], **scale), CONTENTS[:1])[0], Invalid)


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("verdict: yes", 1.0),
        ("VERDICT: **No**.", 0.0),
        ("verdict: yes\nNo, wait. Verdict: no", 0.0),
        ("verdict: yes or no", None),
        ("verdict: yes, because", None),
        ("verdict:", None),
        ("yes", None),
        ("verdict: no\nThat is all.", 0.0),
        ("verdict: nothing", None),
    ],
)
def test_the_last_verdict_counts_and_is_all_of_its_line(reply: str, verdict: float | None) -> None:
    assert final_verdict(reply) == verdict


@pytest.mark.parametrize(
    ("reply", "score"),
    [("score: 7", 7.0), ("Score: **2.5**", 2.5), ("score: 11", None), ("score: 7/10", None), ("score: -3", None),
     ("score: " + "1" * 50, None), ("score: nan", None), ("score: 3\nscore: 4.", 4.0)],
)  # fmt: skip
def test_a_score_is_the_number_behind_the_last_marker(reply: str, score: float | None) -> None:
    assert final_score(reply) == score


def test_verdicts_are_compared_with_labels_and_one_that_was_cut_off_is_wrong() -> None:
    for label, good in ((True, True), (1, True), (False, False), (0, False), (-1, False)):
        said = "verdict: yes" if good else "verdict: no"
        assert reward({"label": label}, said) == 1.0
        assert reward({"label": label}, "verdict: no" if good else "verdict: yes") == 0.0
        assert reward({"label": label}, "?") == 0.0
        assert reward({"label": label}, Reply(said, StopReason.LENGTH)) == 0.0
    assert isinstance(reward({}, "verdict: yes"), Invalid) and isinstance(reward({"label": "x"}, ""), Invalid)


# -- in the verbs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(trained: Path, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "judge")
    save_model(tiny(tokenizer), "start", tokenizer)
    rows = [{"id": str(i), "prompt": f"say {c}", "responses": ["yes", "no"]} for i, c in enumerate("abc")]
    write(tmp_path / "items.jsonl", rows)
    write(tmp_path / "rows.jsonl", [{"id": str(i), "prompt": f"say {c}"} for i, c in enumerate("abcdefghij")])
    recipe_file(votes=3)
    return tmp_path


def recipe_file(**settings: Any) -> None:
    given = {"model": "judge", "template": TEMPLATE, "temperature": 1.0, "max_tokens": 30, **settings}
    Path("judge.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items()))


def options(out: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "start", "out": out, "steps": 4, "prompts": 2, "group": 4, "max_tokens": 9, "lr": 1e-2, "threads": 1,
        "env_workers": 1, "quiet": True, "save_every": 2, "judge": ("judge.toml",), **more,
    }  # fmt: skip


def left(out: str) -> dict[str, bytes]:
    folder = Path(out)
    return {p.name: p.read_bytes() for p in [folder / "metrics.jsonl", *sorted(folder.glob("rollouts/*"))]}


def test_label_gives_what_the_service_answers(place: Path) -> None:
    found = posttrain.label("items.jsonl", "judge=judge.toml", out="out.jsonl")
    recipe = read_recipe("judge.toml")
    assert isinstance(recipe, Generative)
    judge = GenerativeJudge(recipe)
    for row in read("out.jsonl"):
        answers = asked(judge, [{"prompt": row["prompt"], "response": text} for text in row["responses"]])
        assert row["scores"] == [None if isinstance(a, Invalid) else a for a in answers]
    assert any(note.startswith("judge: asked 6") and "tokens/reply" in note for note in found.notes)


def test_labels_are_not_continued_with_another_judge(place: Path) -> None:
    posttrain.label("items.jsonl", "judge=judge.toml", out="out.jsonl")
    recipe_file(votes=5)
    with pytest.raises(UserError):
        posttrain.label("items.jsonl", "judge=judge.toml", out="out.jsonl", resume=True)
    recipe_file(votes=3)
    posttrain.label("items.jsonl", "judge=judge.toml", out="out.jsonl", resume=True)


def test_it_is_the_reward_of_training_evaluation_and_samples(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = posttrain.rl("rows.jsonl", **options("run", steps=1))
    rows = [row for step in rollout_steps(run.path) for row in read_rollouts(run.path, step)]
    recipe = read_recipe("judge.toml")
    assert isinstance(recipe, Generative)
    answers = asked(GenerativeJudge(recipe), [{"prompt": row["prompt"], "response": row["text"]} for row in rows])
    for row, answer in zip(rows, answers, strict=True):
        assert row["reward"] == (None if isinstance(answer, Invalid) else answer)
    assert any(row["reward"] is not None for row in rows)
    played = posttrain.evaluate("rows.jsonl", model="start", judge=("judge.toml",), samples=2, max_tokens=5)
    assert any(note.startswith("judge: asked") for note in played.notes)
    items = posttrain.sample(
        "rows.jsonl",
        "start",
        judge=("judge.toml",),
        samples=2,
        max_tokens=5,
        quiet=True,
        out="sampled.jsonl",
    )
    assert all("scores" in row for row in items.rows())
    main(["check", "--judge", "judge.toml", "--tasks", "rows.jsonl"])
    assert "it asks the service judge: it answered" in capsys.readouterr().out


def test_a_resumed_run_repeats_every_byte(place: Path) -> None:
    whole = posttrain.rl("rows.jsonl", **options("run", eval_every=1, held_out=0.4))
    expected = left("run")
    for name, kept in (("killed", True), ("forgot", False)):  # without the journal, its votes are drawn again
        shutil.copytree("run", name)
        shutil.rmtree(f"{name}/checkpoints/step-000004")
        if not kept:
            Path(name, ANSWERS).unlink()
        resumed = posttrain.rl("rows.jsonl", **options(name, eval_every=1, held_out=0.4, resume=True))
        assert left(name) == expected and resumed.metrics == whole.metrics


def test_a_resumed_run_notices_other_weights_of_its_judge(place: Path, tokenizer: Tokenizer) -> None:
    posttrain.rl("rows.jsonl", **options("run", steps=2))
    model = load_model("judge")
    with torch.no_grad():
        model.head.weight[0, 0] += 1.0
    model.save(Path("judge"))
    with pytest.raises(UserError, match="--judge judge changed"):
        posttrain.rl("rows.jsonl", **options("run", steps=4, resume=True))


def test_mistakes_of_a_recipe_end_every_verb_in_one_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe_file(template="{prompt}")
    verbs = [
        ["label", "--items", "items.jsonl", "--with", "judge=judge.toml"],
        ["eval", "--tasks", "rows.jsonl", "--model", "start", "--judge", "judge.toml"],
        ["rl", "--tasks", "rows.jsonl", "--model", "start", "--judge", "judge.toml", "--max-tokens", "5"],
        ["check", "--tasks", "rows.jsonl", "--judge", "judge.toml"],
    ]
    for words in verbs:
        assert main(words) == 2
        told = capsys.readouterr().err.strip()
        assert told == "posttrain: judge.toml: template has no place {response}: the judge would not see what it judges"
