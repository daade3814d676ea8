"""Plain prompts of rows reach a model as it was trained: instruct models in their chat template, others as bare text."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import CHATML as FOREIGN
from conftest import tiny
from tiny_models import make

import posttrain
from posttrain.cli.main import main
from posttrain.core.types import Reply, Task, Turn, UserError
from posttrain.data.chat_prompts import AsMessages
from posttrain.data.tasks import hold_out, to_tasks
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.custom_template import CHATML, around
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.chat_choice import chatting, system_of
from posttrain.runs.record.rollout_index import open_index
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.run_reading import read_run
from posttrain.services.reward_model_service import RewardModelService

ROWS = [{"prompt": f"what is {i} and 1", "answer": str(i + 1), "response": f"it is {i + 1}"} for i in range(8)]
TOLD = "prompts are user messages in the model's chat template"
BARE = "prompts are bare text, without the model's chat template"
TINY: dict[str, Any] = {
    "env_workers": 0, "steps": 1, "prompts": 2, "group": 2, "max_tokens": 4, "kl": 0.0, "quiet": True,
}  # fmt: skip
PASS: dict[str, Any] = {"steps": 1, "rows": 2, "quiet": True}


def right(task: Task, reply: str) -> float:
    return float(task["answer"] in reply and "what" in task["prompt"])


def words(template: str | None) -> Tokenizer:
    trained = Tokenizer.train(["what is it and 0123456789", *around(CHATML)], 96, "characters")
    return trained if template is None else trained.templated(template, "its template")


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A checkpoint with a template: "instruct", "base" (whose template ends replies otherwise), or "none"."""
    templates = {"instruct": CHATML, "base": FOREIGN, "none": None}

    def made(name: str, native: bool = True) -> Path:
        folder = tmp_path_factory.mktemp(name) / "model"
        tokenizer = words(templates[name])
        if native:
            save_model(tiny(tokenizer, context=2048), folder, tokenizer)
        else:
            sizes = {"max_position_embeddings": 2048, "vocab_size": tokenizer.vocab_size}
            make("phi3", folder, eos_token_id=tokenizer.eos_id, **sizes)
            tokenizer.save(folder)
        return folder

    return made


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The rollouts of the first step, with their tokens as text."""
    tokenizer = words(None)
    rows = read_rollouts(run, 1, None)
    return [{**row, "whole": tokenizer.decode(row["tokens"]), "tokenizer": tokenizer} for row in rows]


def asked(prompt: str, system: str | None = None) -> str:
    said = [{"role": "user", "content": prompt}]
    said = said if system is None else [{"role": "system", "content": system}, *said]
    return words(CHATML).render(said)


def sizes(run: Path) -> str:
    return "\n".join(read_run(run)["sizes"])


@pytest.mark.parametrize("native", [True, False], ids=["native", "backed"])
def test_an_instruct_model_reads_plain_prompts_in_its_template(
    model_of: Callable[..., Path], native: bool, tmp_path: Path
) -> None:
    if not native:
        pytest.importorskip("transformers")
    run = posttrain.rl(ROWS, right, model=str(model_of("instruct", native)), out=str(tmp_path), **TINY)
    assert all(row["whole"].startswith(asked(row["columns"]["prompt"])) for row in rows_of(run.path))
    assert TOLD in sizes(run.path) and read_run(run.path)["chat"] == {"on": True, "system": None}
    assert all(row["invalid"] is None for row in rows_of(run.path)), "rewards read the prompt as it stands in the row"


@pytest.mark.parametrize(("model", "options"), [("base", {}), ("instruct", {"chat": False}), ("none", {})])
def test_other_models_read_them_as_bare_text(
    model_of: Callable[..., Path], model: str, options: dict[str, Any], tmp_path: Path
) -> None:
    run = posttrain.rl(ROWS, right, model=str(model_of(model)), out=str(tmp_path), **TINY, **options)
    assert all(row["whole"].startswith(row["columns"]["prompt"]) for row in rows_of(run.path))
    assert (BARE in sizes(run.path)) == (model != "none") and read_run(run.path)["chat"]["on"] is False


def test_who_goes_on_from_a_run_does_as_it_did(model_of: Callable[..., Path], tmp_path: Path) -> None:
    how = {**TINY, "save_every": 1}
    first = posttrain.sft(
        ROWS, model=str(model_of("base")), out=str(tmp_path / "a"), chat=True, system="be brief", **PASS
    )
    assert first.checkpoint is not None and system_of(first.checkpoint) == "be brief", "what posttrain chat takes over"
    run = posttrain.rl(ROWS, right, model=str(first.path), out=str(tmp_path / "b"), **how)
    assert all("be brief" in row["whole"] for row in rows_of(run.path)) and f"as in {first.path}" in sizes(run.path)
    resumed = posttrain.rl(ROWS, right, model=str(first.path), out=str(run.path), resume=True, **{**how, "steps": 2})
    assert all("be brief" in words(None).decode(r["tokens"]) for r in read_rollouts(resumed.path, 2, None))
    found = posttrain.evaluate(ROWS, right, model=str(resumed.checkpoint), samples=1, max_tokens=2, env_workers=0)
    assert all(r.prompt == f"be brief\n{r.task['prompt']}" and r.asked == r.task["prompt"] for r in found.rollouts)
    assert any(TOLD in note and "behind a system message" in note for note in found.notes)


BRIEF = {"on": True, "system": "be brief"}
KNOWN: list[tuple[str, dict[str, Any] | None, dict[str, Any], tuple[bool, str | None]]] = [
    # template of the model, what its run did, options -> chat, system
    (CHATML, BRIEF, {}, (True, "be brief")),
    (FOREIGN, BRIEF, {}, (True, "be brief")),
    (CHATML, BRIEF, {"system": "be long"}, (True, "be long")),
    (CHATML, BRIEF, {"chat": False}, (False, None)),
    (CHATML, BRIEF, {"chat_template": "chatml"}, (True, "be brief")),
    (CHATML, {"on": False}, {}, (False, None)),
    (CHATML, {"on": False}, {"chat": True}, (True, None)),
    (
        CHATML,
        {"on": False},
        {"chat_template": "chatml"},
        (True, None),
    ),  # given for this run: bare text was of the other one
    (CHATML, None, {}, (True, None)),
    (FOREIGN, None, {}, (False, None)),
]


@pytest.mark.parametrize(("template", "known", "options", "found"), KNOWN)
@pytest.mark.parametrize("place", ["", "checkpoints/step-000001"])
def test_options_decide_then_the_run_then_the_template(
    template: str, known: dict[str, Any] | None, options: dict[str, Any], found: Any, place: str, tmp_path: Path
) -> None:
    run = {"verb": "sft", "config": {}} if known is None else {"verb": "sft", "config": {}, "chat": known}
    (tmp_path / "run.json").write_text(json.dumps(run))
    asked = SimpleNamespace(**{"chat": None, "system": None, "chat_template": None, **options})
    tokenizer = words(template)
    chosen = chatting(asked, tmp_path / place, tokenizer, [tokenizer.eos_id])
    assert (chosen.on, chosen.system) == found


def test_two_models_are_each_shown_the_same_tasks_in_their_own_way(model_of: Callable[..., Path]) -> None:
    found = posttrain.evaluate(
        ROWS, right, model=str(model_of("instruct")), against=str(model_of("none")), samples=1, max_tokens=2,
        env_workers=0,
    )  # fmt: skip
    assert found.rewards.keys() == {r.task["id"] for r in found.against[0].rollouts}
    assert all("messages" in r.task for r in found.rollouts) and all(
        "messages" not in r.task for r in found.against[0].rollouts
    )


def test_the_model_that_a_run_began_with_is_compared_behind_the_same_system_message(
    model_of: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = posttrain.sft(ROWS, model=str(model_of("instruct")), out=str(tmp_path / "begun"), **PASS)
    run = posttrain.rl(ROWS, right, model=str(begun.path), out=str(tmp_path / "run"), system="what is it", **TINY)
    for other in (begun.path, model_of("instruct")):  # a run of its own without a system message, and no run
        found = posttrain.evaluate(
            ROWS, right, model=str(run.path), against=str(other), samples=1, max_tokens=2, env_workers=0
        )
        assert [r.prompt for r in found.rollouts] == [r.prompt for r in found.against[0].rollouts]
        assert all(r.prompt.startswith("what is it\n") for r in found.rollouts)
    assert "read different prompts" not in capsys.readouterr().err
    strange = posttrain.sft(ROWS, model=str(model_of("instruct")), out=str(tmp_path / "strange"), **PASS)
    both = {"model": str(run.path), "against": str(strange.path), "samples": 1, "max_tokens": 2, "env_workers": 0}
    found = posttrain.evaluate(ROWS, right, **both)
    assert found.rollouts[0].prompt != found.against[0].rollouts[0].prompt, "it was trained without one"
    assert "read different prompts" in capsys.readouterr().err


def write(rows: list[dict[str, Any]], path: Path) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def test_of_a_response_the_assistants_text_alone_is_trained(model_of: Callable[..., Path], tmp_path: Path) -> None:
    file = write(ROWS, tmp_path / "rows.csv")
    run = posttrain.sft(file, model=str(model_of("instruct")), out=str(tmp_path / "run"), **PASS)
    for row in rows_of(run.path):
        [learned] = [s for s in row["spans"] if s["learned"]]
        said = row["tokens"][learned["start"] : learned["start"] + learned["length"]]
        tokenizer = row["tokenizer"]
        assert said == [*tokenizer.encode(row["columns"]["response"]), tokenizer.eos_id]
        assert tokenizer.decode(row["tokens"][: learned["start"]]) == asked(row["columns"]["prompt"])


@pytest.mark.parametrize("verb", ["prefer", "reward_model"])
def test_chosen_and_rejected_are_replies_of_the_assistant(
    model_of: Callable[..., Path], verb: str, tmp_path: Path
) -> None:
    pairs = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": "it is 0"} for row in ROWS]
    file = write(pairs, tmp_path / "pairs.csv")
    run = getattr(posttrain, verb)(file, model=str(model_of("instruct")), out=str(tmp_path / "run"), **PASS)
    assert TOLD in sizes(run.path)
    for row in rows_of(run.path):
        begins = asked(row["columns"]["prompt"])
        assert row["whole"].startswith(begins) and row["whole"][len(begins) :].startswith("it is ")
    if verb == "reward_model":
        assert run.checkpoint is not None
        model = RewardModelService(run.checkpoint)
        content = {"prompt": "what is 1 and 1", "response": "it is 2"}
        chat = [{"role": "user", "content": content["prompt"]}, {"role": "assistant", "content": "it is 2"}]
        model.submit(0, content)
        model.submit(1, {"messages": chat})
        (_, one), (_, other) = model.poll()
        assert one == other, "rows with a plain prompt are read as in training"


def test_held_out_tasks_and_ids_do_not_depend_on_the_template() -> None:
    talked = [{"messages": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in ROWS]
    for tasks in (to_tasks(ROWS), to_tasks(talked)):
        shown = tasks.shown(AsMessages("be brief"))
        assert [t["id"] for t in tasks] == [t["id"] for t in shown]
        assert [t["id"] for t in hold_out(tasks, 0.5)[1]] == [t["id"] for t in hold_out(shown, 0.5)[1]]
        assert hold_out(shown, 0.5)[1][0]["messages"][0] == {"role": "system", "content": "be brief"}
    assert "prompt" in to_tasks(ROWS).taken()


def test_rows_of_messages_keep_them_and_a_conversation_written_down_is_one() -> None:
    system, user = {"role": "system", "content": "x"}, {"role": "user", "content": "hi"}
    show = AsMessages("be brief")
    assert show({"messages": [user]})["messages"] == [{"role": "system", "content": "be brief"}, user]
    assert show({"messages": [system, user]})["messages"] == [system, user]
    developer = {"role": "developer", "content": "x"}
    assert show({"messages": [developer, user]})["messages"] == [developer, user], "another name of the same role"
    told = {"prompt": "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: no\n\nAssistant:", "responses": [" so", " go"]}
    found = AsMessages()(told)
    assert found["prompt"] == told["prompt"], "rewards read the row as it is"
    assert [m["content"] for m in found["messages"]] == ["hi", "yes?", "no"] and found["responses"] == ["so", "go"]
    assert [m["role"] for m in found["messages"]] == ["user", "assistant", "user"]
    taught = show({**told, "response": " so", "teacher_prompt": "b"})
    assert taught["messages"] == [{"role": "system", "content": "be brief"}, *found["messages"]], "and not the response"
    assert [m["content"] for m in taught["teacher_prompt"]] == ["be brief", "b"]
    imitated = AsMessages(answered=True)({**told, "response": " so"})["messages"]
    assert imitated[-1] == {"role": "assistant", "content": "so"}, "as the responses of comparisons"
    before = [{**m, "weight": 0} if m["role"] == "assistant" else m for m in found["messages"]]
    assert imitated[:-1] == before, "the conversation is context"


def test_items_have_the_prompts_as_they_are(model_of: Callable[..., Path], tmp_path: Path) -> None:
    model = str(model_of("instruct"))
    written = posttrain.sample(
        ROWS, model=(model,), out=str(tmp_path / "items.jsonl"), samples=2, max_tokens=2, system="be brief", quiet=True
    )
    assert [row["prompt"] for row in written.rows()] == [row["prompt"] for row in ROWS]
    assert all("messages" not in row for row in written.rows()) and any(TOLD in note for note in written.notes)


def own_text(task: Task) -> Any:
    reply: Reply = yield f"so: {task['answer']}"
    return float(len(reply))


@pytest.mark.parametrize(
    ("model", "env", "options", "told"),
    [
        ("none", right, {"chat": True}, "--chat needs a chat template, and this model has none"),
        (
            "base",
            right,
            {"system": "be brief"},
            "--system needs prompts in a chat template, and these are bare text: add --chat",
        ),
        ("instruct", right, {"chat": False, "system": "a"}, "--system needs prompts"),
        ("instruct", own_text, {"chat": True}, "that this environment yields: yield Turn"),
    ],
)
def test_what_contradicts_itself_is_refused(
    model_of: Callable[..., Path], model: str, env: Any, options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told):
        posttrain.rl(ROWS, env, model=str(model_of(model)), out=str(tmp_path / "run"), **TINY, **options)
    assert not (tmp_path / "run" / "run.json").exists()


def test_check_says_how_prompts_reach_the_model(
    model_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("my.py").write_text(
        "def reward(task, reply):\n    return float(task['answer'] in reply)\n\n"
        "def own(task):\n    reply = yield 'so: '\n    return float(task['answer'] in reply)\n"
    )
    check = ["check", "--tasks", "rows.jsonl", "--env", "my.py:reward"]
    for name, said in (("instruct", TOLD), ("base", BARE)):
        assert main([*check, "--model", str(model_of(name))]) == 0
        assert said in capsys.readouterr().out
    assert main([*check[:-1], "my.py:own", "--model", str(model_of("instruct"))]) == 0
    assert "the environment shows bare text, without the model's chat template" in capsys.readouterr().out
    assert main([*check, "--chat"]) == 2 and "--chat has no effect without --model" in capsys.readouterr().err


def greeted(task: Task) -> Any:
    said = [{"role": "system", "content": "be brief " * 20}, {"role": "user", "content": task["prompt"]}]
    reply: Reply = yield Turn(messages=said)
    return float(len(reply))


def test_lists_show_what_the_user_said_last(model_of: Callable[..., Path], tmp_path: Path) -> None:
    model = str(model_of("instruct"))
    run = posttrain.rl(ROWS, greeted, model=model, out=str(tmp_path / "rl"), **TINY)
    other = posttrain.sft(ROWS, model=model, out=str(tmp_path / "sft"), system="be brief " * 20, **PASS)
    prompts = {row["prompt"] for row in ROWS}
    for made in (run, other):
        [index] = open_index(made.path)
        assert set(read_index(index)) <= prompts


def read_index(path: Path) -> list[str]:
    from pyarrow import parquet

    found: list[str] = parquet.read_table(path)["prompt_start"].to_pylist()
    return found
