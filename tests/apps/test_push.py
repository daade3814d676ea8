"""`posttrain push`: the hub's own client uploads a checkpoint and its card, nothing else, and each failure is one line."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from conftest import tiny
from model_hub import READS, TOKEN, ModelHub, Repository, model_hub, use

import posttrain
from posttrain.apps.publishing import hub_folder, model_card, private_text, upload
from posttrain.apps.publishing.published_run import find
from posttrain.apps.publishing.push import carry_out, prepared
from posttrain.cli.main import app, main
from posttrain.cli.main import prepared as words_of
from posttrain.cli.training_commands import read
from posttrain.config.resolve import as_dict
from posttrain.config.verbs import VERBS
from posttrain.core.intervals import share_interval
from posttrain.core.types import UserError
from posttrain.models import hub_download
from posttrain.models.adapters.adapter_config import read_adapter_config
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder import causal
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs import run_options
from posttrain.runs.curves import curves
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.system import hub as system_hub

ROWS = [{"prompt": f"{a}+{b}=", "response": str(a + b), "answer": str(a + b)} for a in range(4) for b in range(4)]
PAIRS = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "99"} for row in ROWS]
QUICK: dict[str, Any] = {"quiet": True, "threads": 1, "lr": 1e-3, "steps": 2}
PLAYED: dict[str, Any] = {"prompts": 2, "group": 2, "max_tokens": 4, "env_workers": 0}
CARD = b"---\nlicense: other\nlicense_name: tiny-licence\n---\n"
SECRET = "3+3="  # a prompt, which no published file may hold


REWARD = "SUCCESS = 1.0\n\n\ndef right(task, reply):\n    return float(reply == task['answer'])\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[SimpleNamespace]:
    """A hub with a model, and runs of every verb that go back to it."""
    place = tmp_path_factory.mktemp("place")
    save_model(tiny(tokenizer), place / "model", tokenizer)
    files = {file.name: file.read_bytes() for file in (place / "model").iterdir()}
    with (
        model_hub(**{"org/base": Repository({**files, "README.md": CARD})}) as hub,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.chdir(place)
        use(patch, hub.address, place / "cache")
        (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
        (place / "mine.py").write_text(REWARD)
        posttrain.sft(
            "rows.jsonl", model="org/base", out="sft", held_out=0.5, eval_every=1, save_every=1, rows=2, **QUICK
        )
        posttrain.rl("rows.jsonl", "mine.py:right", "sft", out="rl", held_out=0.5, eval_every=1, save_every=1, seed=3,
                     settings={"minibatches": 2, "surrogate.high": 0.3}, **PLAYED, **QUICK)  # fmt: skip
        posttrain.prefer(str(place / "pairs.jsonl"), model="org/base", out="lora", lora=2, rows=2, **QUICK)
        posttrain.prefer("pairs.jsonl", model="sft", out="lora-of-run", lora=2, rows=2, **QUICK)
        posttrain.reward_model("pairs.jsonl", model="sft", out="reward-model", held_out=0.4, rows=2, **QUICK)
        posttrain.distill("rows.jsonl", model="sft", teacher="sft", out="distill", **PLAYED, **QUICK)
        curves("rl")
        yield SimpleNamespace(hub=hub, path=place)
    system_hub.reached.cache_clear()


@pytest.fixture
def hub(place: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> ModelHub:
    """The same, with nothing pushed yet."""
    served: ModelHub = place.hub
    served.repositories = {"org/base": served.repositories["org/base"]}
    served.stored.clear()
    served.seen.clear()
    served.refuse.clear()
    monkeypatch.chdir(place.path)
    use(monkeypatch, served.address, place.path / "cache", TOKEN)
    return served


def front(card: bytes) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(card.decode().split("---\n")[1])
    return found


def text_of(run: str, *evaluations: str) -> str:
    """The card of a run."""
    card = prepared(run, "org/name", evaluations=evaluations).files["README.md"]
    assert isinstance(card, bytes)
    return card.decode()


def refused(*words: Any, **more: Any) -> str:
    with pytest.raises(UserError) as caught:
        carry_out(prepared(*words), **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("run", "library", "task", "tags"),
    [
        ("sft", "transformers", "text-generation", ["sft"]),
        ("rl", "transformers", "text-generation", ["rl", "grpo"]),
        ("lora", "peft", "text-generation", ["prefer", "dpo", "lora"]),
        ("reward-model", "transformers", "text-classification", ["reward-model", "bradley-terry"]),
        ("distill", "transformers", "text-generation", ["distill"]),
    ],
)
def test_each_kind_of_run_is_pushed_with_what_the_hub_reads(
    run: str, library: str, task: str, tags: list[str], hub: ModelHub, place: SimpleNamespace
) -> None:
    assert main(["push", run, f"org/{run}", "--private"]) == 0
    repository = hub.repositories[f"org/{run}"]
    there, told = repository.now(), front(repository.now()["README.md"])
    assert repository.private and repository.messages[0].startswith(tags[0])
    assert told["base_model"] == "org/base" and told["library_name"] == library and told["pipeline_tag"] == task
    assert told["tags"][0] == "posttrain" and told["tags"][1 : len(tags) + 1] == tags
    assert (told["license"], told["license_name"]) == ("other", "tiny-licence")
    weights = "adapter_model.safetensors" if library == "peft" else "model.safetensors"
    own = find(run).folder
    assert there[weights] == (own / weights).read_bytes() and "tokenizer.json" in there
    assert not [name for name in there if "/" in name or name in ("manifest.json", "rows.jsonl")]
    assert not [name for name, data in there.items() if SECRET.encode() in data]
    card = there["README.md"].decode()
    for line in json.loads((place.path / run / "run.json").read_text())["objective"]:
        assert line in card
    assert str(place.path) not in card and ("pairs.jsonl" in card or "rows.jsonl" in card)


def test_a_pushed_model_loads_from_the_hub_as_it_was(hub: ModelHub) -> None:
    for run in ("rl", "lora"):
        carry_out(prepared(run, f"org/{run}"))
        hub_download.FOUND.clear()
        there, own = load_model(f"org/{run}"), load_model(find(run).folder)
        assert all(torch.equal(a, b) for a, b in zip(there.parameters(), own.parameters(), strict=True))


def test_an_adapter_names_its_base_and_peft_opens_it(hub: ModelHub, place: SimpleNamespace, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    commit = hub.repositories["org/base"].branches["main"]
    ready = prepared("lora", "org/lora", ask=False)
    hub_folder.write(ready.files, tmp_path / "out")
    assert read_adapter_config(tmp_path / "out").base == f"org/base@{commit}"
    base = transformers.AutoModelForCausalLM.from_pretrained(str(place.path / "model"))
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "out")).merge_and_unload()
    tokens = torch.arange(5, 15)
    own = load_model(find("lora").folder)
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
        torch.testing.assert_close(own.logits(own(tokens, torch.arange(10), causal)), expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_of_a_local_base_is_refused_unless_its_base_is_named(hub: ModelHub) -> None:
    said = refused("lora-of-run", "org/lora")
    assert "a folder of this machine: push it first and name it with --base org/name" in said
    ready = prepared("lora-of-run", "org/lora", None, None, "org/sft@v1")
    told = json.loads(ready.files["adapter_config.json"])  # type: ignore[arg-type]
    assert (told["base_model_name_or_path"], told["revision"]) == ("org/sft", "v1")
    assert "not a model of the hub" in refused("lora-of-run", "org/lora", None, None, "sft")


@pytest.mark.parametrize("run", ["sft", "rl", "lora", "reward-model", "distill"])
def test_the_command_of_a_card_gives_the_options_of_the_run(run: str, hub: ModelHub, place: SimpleNamespace) -> None:
    about = json.loads((place.path / run / "run.json").read_text())
    typed = model_card.command(about).replace("\\\n", " ")
    _, bound, _ = app.parse_args(words_of(shlex.split(typed)[1:]), exit_on_error=False, print_error=False)
    kind = VERBS[about["verb"]].options
    given = bound.arguments["config"]
    config = read(kind, given, bound.arguments.get("set", ())) if kind.flags() else given
    expected = {n: private_text.without_folders(v) for n, v in about["config"].items() if n not in run_options.LEFT}
    found = {n: v for n, v in as_dict(config).items() if n not in run_options.LEFT}
    found["settings"] = {n: str(v) for n, v in (found.get("settings") or {}).items()}
    expected["settings"] = {n: str(v) for n, v in (expected.get("settings") or {}).items()}
    assert found == expected


def test_folders_of_the_machine_are_cut_off_and_names_and_addresses_are_not() -> None:
    assert private_text.without_folders("/home/me/x/rows.jsonl") == "rows.jsonl"
    assert (
        private_text.without_folders("~/mine.py:reward + 0.5 ../other/your.py:form")
        == "mine.py:reward + 0.5 your.py:form"
    )
    assert private_text.without_folders("a=/srv/rm") == "a=rm"
    for kept in ("org/name@v1", "http://host:8000/v1", "data/rows.jsonl", "sqrt(a)/b"):
        assert private_text.without_folders(kept) == kept


def test_figures_have_the_intervals_of_the_evaluation(hub: ModelHub, tmp_path: Path) -> None:
    rows = read_rollouts("rl", 2, ["task", "reward"], held_out=True)
    rewards = [row["reward"] for row in rows]
    assert len({row["task"] for row in rows}) == len(rows) > 5
    low, high = share_interval(rewards)
    figures = {"tasks": 9, "pass@4": {"mean": 0.5, "low": 0.4, "high": 0.6, "tasks": 9}}
    against = [
        {"model": "/home/me/runs/sft", "win_rate": {"mean": 0.75, "low": 0.6, "high": 0.9, "tasks": 9, "wins": {}}}
    ]
    against.append({"model": "base", "figures": {}})
    (tmp_path / "test.json").write_text(json.dumps({"figures": figures, "against": against}))
    card = text_of("rl", str(tmp_path / "test.json"))
    assert f"| held out | accuracy | {sum(rewards) / len(rows):.4g} | [{low:.4g}, {high:.4g}] | {len(rows)} |" in card
    assert "| test | pass@4 | 0.5 | [0.4, 0.6] | 9 |" in card
    assert (
        "| test | win rate over sft | 0.75 | [0.6, 0.9] | 9 |" in card
        and "/home" not in card
        and "over base" not in card
    )
    report = json.loads(Path("reward-model/report.json").read_text())["figures"]["accuracy"]
    card = text_of("reward-model")
    assert f"| held out | accuracy | {report['mean']:.4g} |" in card
    assert "has no figures" in refused("rl", "org/rl", None, None, None, ["rl/run.json"])


def test_the_picture_of_the_curves_goes_along_where_there_is_one(hub: ModelHub) -> None:
    files = prepared("rl", "org/rl").files
    assert files["curves.png"] == Path("rl/curves.png") and b"](curves.png)" in files["README.md"]  # type: ignore[operator]
    assert "curves.png" not in prepared("sft", "org/sft").files


def test_the_best_checkpoint_is_that_of_the_best_figure(hub: ModelHub, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree("sft", run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for losses, best in (((1.0, 2.0), 1), ((2.0, 1.0), 2), ((1.0, 1.0), 2)):
        changed = [{**line, "eval/loss": loss} for line, loss in zip(lines[-2:], losses, strict=True)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
        assert find(str(run), "best").step == best
    assert find(str(run), "1").step == 1 and find(str(run)).step == 2
    assert "has checkpoints of steps 1, 2" in refused(str(run), "org/x", None, "7")
    (run / "checkpoints" / "step-000002" / "model.safetensors").write_bytes(b"x")
    assert "is damaged" in refused(str(run), "org/x", None, "2")


def test_a_dry_run_writes_the_folder_and_asks_nobody(
    hub: ModelHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert main(["push", "rl", "org/rl", "--dry-run", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    files = prepared("rl", "org/rl", ask=False).files
    assert {file.name for file in (tmp_path / "out").iterdir()} == set(files) and not hub.seen
    assert all(name in said for name in files) and "nothing was uploaded" in said
    assert main(["push", "rl", "org/rl", "--dry-run", "--out", str(tmp_path / "out")]) == 2
    assert "is there already" in " ".join(capsys.readouterr().err.split())


def test_a_second_push_of_a_run_replaces_the_first_and_keeps_the_history(hub: ModelHub) -> None:
    carry_out(prepared("sft", "org/sft", None, "1"))
    repository = hub.repositories["org/sft"]
    first = repository.now()
    hub.repositories["org/sft"].commit("main", {**first, "old.json": b"{}", "LICENSE": b"x"})
    carry_out(prepared("sft", "org/sft"))
    assert repository.now()["model.safetensors"] == (find("sft").folder / "model.safetensors").read_bytes()
    assert "old.json" not in repository.now() and {"LICENSE", ".gitattributes"} <= set(repository.now())
    assert first in repository.commits.values()


def test_a_repository_with_other_content_is_refused_and_a_branch_or_replace_is_the_way(hub: ModelHub) -> None:
    carry_out(prepared("sft", "org/mine"))
    before = hub.repositories["org/mine"].now()
    said = refused("rl", "org/mine")
    assert "org/mine holds other files already (README.md, config.json" in said and "--replace" in said
    assert hub.repositories["org/mine"].now() == before
    carry_out(prepared("rl", "org/mine", "grpo"))
    assert hub.repositories["org/mine"].now() == before
    assert front(hub.repositories["org/mine"].now("grpo")["README.md"])["tags"][1] == "rl"
    carry_out(prepared("rl", "org/mine"), replace=True)
    assert front(hub.repositories["org/mine"].now()["README.md"])["tags"][1] == "rl"
    hub.repositories["org/theirs"] = Repository({"README.md": b"# mine", "model.safetensors": b"x"})
    assert "holds other files already" in refused("rl", "org/theirs")


@pytest.mark.parametrize(
    ("token", "repository", "said"),
    [
        ("", "org/x", "a push needs a token that may write"),
        ("hf_wrong", "org/x", "the hub refuses your token (HF_TOKEN)"),
        (READS, "org/x", "your token (HF_TOKEN) has no access to org/x"),
        (TOKEN, "others/x", "your token (HF_TOKEN) has no access to others/x"),
        (TOKEN, "x", "is not a repository of the hub"),
    ],
)
def test_a_token_or_a_name_that_does_not_do_is_one_line(
    token: str, repository: str, said: str, hub: ModelHub, place: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, hub.address, place.path / "cache", token)
    assert said in refused("sft", repository)
    assert set(hub.repositories) == {"org/base"}


def test_an_upload_that_breaks_off_leaves_nothing_and_the_next_goes_on(
    hub: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.refuse["/api/models/org/rl/commit"] = 500
    assert "failed with status 500" in refused("rl", "org/rl")
    assert set(hub.repositories["org/rl"].now()) == {".gitattributes"} and hub.stored
    hub.refuse.clear()
    hub.seen.clear()
    carry_out(prepared("rl", "org/rl"))
    assert (
        "PUT" not in {method for method, _, _ in hub.seen} and "model.safetensors" in hub.repositories["org/rl"].now()
    )

    def interrupt(*words: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("huggingface_hub.HfApi.create_commit", interrupt)
    assert "interrupted: org/rl is unchanged; repeat the command to continue" in refused("rl", "org/rl")


def test_an_unreachable_hub_is_one_line(hub: ModelHub, place: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "http://127.0.0.1:9", place.path / "cache", TOKEN)
    assert (
        "127.0.0.1 cannot be reached: nothing was pushed to org/sft; see what would be pushed with --dry-run"
        in refused("sft", "org/sft")
    )


def test_a_folder_without_a_run_is_pushed_without_other_files(
    hub: ModelHub, tmp_path: Path, place: SimpleNamespace
) -> None:
    shutil.copytree(place.path / "model", tmp_path / "merged")
    for name in ("optimizer.safetensors", "rows.jsonl", "trainer_state.json", "notes.txt"):
        (tmp_path / "merged" / name).write_text("x")
    files = prepared(str(tmp_path / "merged"), "org/merged", None, None, "org/base").files
    assert not {"optimizer.safetensors", "rows.jsonl", "trainer_state.json", "notes.txt"} & set(files)
    assert front(files["README.md"])["base_model"] == "org/base"  # type: ignore[arg-type]
    assert "holds no checkpoint" in refused(str(tmp_path), "org/x") and "no such folder" in refused("nowhere", "org/x")


@pytest.fixture
def checkpoint(place: SimpleNamespace, tmp_path: Path) -> Path:
    """A folder of a checkpoint without a run."""
    shutil.copytree(place.path / "model", tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_a_link_to_another_place_is_refused_and_one_into_the_cache_of_the_hub_is_not(
    hub: ModelHub, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "id_rsa").write_text("private")
    (checkpoint / "vocab.txt").symlink_to(tmp_path / "id_rsa")
    assert "vocab.txt is a link to " in refused(str(checkpoint), "org/x")
    (checkpoint / "vocab.txt").unlink()
    snapshot, blobs = tmp_path / "models--org--m" / "snapshots" / "0a", tmp_path / "models--org--m" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(checkpoint.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    assert {"config.json", "model.safetensors"} <= set(prepared(str(snapshot), "org/x").files)


def test_damaged_weights_are_refused_and_stray_ones_stay(hub: ModelHub, checkpoint: Path) -> None:
    (checkpoint / "model-00001-of-00002.safetensors").write_bytes(b"of another time")
    assert "model-00001-of-00002.safetensors" not in prepared(str(checkpoint), "org/x").files
    whole = (checkpoint / "model.safetensors").read_bytes()
    for damaged in (b"junk", whole[:-100]):
        (checkpoint / "model.safetensors").write_bytes(damaged)
        assert "model.safetensors is damaged" in refused(str(checkpoint), "org/x")


def test_places_of_this_machine_leave_the_configuration(hub: ModelHub, checkpoint: Path) -> None:
    told = json.loads((checkpoint / "config.json").read_text())
    inner = {"name_or_path": "~/x/y", "vocab": 3}
    (checkpoint / "config.json").write_text(json.dumps({**told, "_name_or_path": "/home/me/m", "vision_config": inner}))
    content = prepared(str(checkpoint), "org/x").files["config.json"]
    assert isinstance(content, bytes) and json.loads(content) == {**told, "vision_config": {"vocab": 3}}
    (checkpoint / "config.json").write_text(json.dumps({**told, "_name_or_path": "org/m"}))
    assert prepared(str(checkpoint), "org/x").files["config.json"] == checkpoint / "config.json"


def changed(run: str, out: Path, config: dict[str, Any], **about: Any) -> str:
    """A copy of a run whose run.json has other entries."""
    shutil.copytree(run, out)
    told = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**told, **about, "config": {**told["config"], **config}}))
    return str(out)


def test_no_secret_of_the_options_is_published(hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "word-of-the-environment")
    secrets = {
        "env": "mine.py:right,api_key=abc1,url=http://someone:pa=55@host/v1",
        "system": "use sk-abcdefghijklmnop1 and word-of-the-environment",
        "teacher": "https://user:pa55@host:8000/v1",
        "vllm_kwargs": {"api_key": "abc2", "max_tokens": 512},
        "note": "hf_" + "a1" * 17,
    }
    card = text_of(changed("rl", tmp_path / "run", secrets, objective=["secret=abc3 eps=1e-6"]))
    for secret in ("abc1", "abc2", "abc3", "pa=55", "pa55", "sk-abc", "word-of", "a1a1", "someone", "user:"):
        assert secret not in card, secret
    assert "http://***@host/v1" in card and "max-tokens 512" in card and "eps=1e-6" in card


def test_texts_of_a_run_are_no_markup_of_its_card(hub: ModelHub, tmp_path: Path) -> None:
    evil = "</details><script>alert(1)</script>\n```\n# Owned\n[x](javascript:y)"
    about = {"objective": ["a\n```\n<img src=x>"], "sizes": ["rows of '<b>|[x](y)`' in /home/me/a"]}
    figures = tmp_path / "a|b<i>.json"
    figures.write_text(json.dumps({"figures": {"acc|`x`": {"mean": 0.5}}}))
    run = changed("rl", tmp_path / "run", {"system": evil, "algorithm": "/home/me/my.py:`own`"}, **about)
    card = text_of(run, str(figures))
    lines, fence = [], ""
    for line in card.splitlines():
        if not fence and (opening := re.match("`{3,}", line)):
            fence = opening[0]
        elif fence and line == fence:
            fence = ""
        elif not fence:
            lines.append(re.sub(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", "", line))  # without code
    outside = "\n".join(lines)
    assert not fence and "script" not in outside and "# Owned" not in outside and "<img" not in outside
    assert r"rows of '\<b\>\|\[x\](y)\`' in a" in outside
    row = next(line for line in lines if line.startswith(r"| a\|b\<i\> |"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 6
    assert "/home/me" not in card and str(front(card.encode())["tags"][2]) == "my.py:`own`"


def test_folders_with_spaces_are_cut_off() -> None:
    assert private_text.without_folders("/home/a person/my rows/a b.jsonl") == "a b.jsonl"
    assert private_text.without_folders("file:///home/me/rows.jsonl") == "rows.jsonl"
    assert private_text.without_folders("/a b/x.py:f + /c/y.py:g") == "x.py:f + y.py:g"


@pytest.mark.parametrize("figure", [{"mean": "0.5"}, {"mean": float("nan")}, {"mean": 1, "low": "a", "high": 2}, {}])
def test_figures_that_are_no_numbers_are_one_line(figure: Any, hub: ModelHub, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(json.dumps({"figures": {"accuracy": figure}}))
    assert "has no figures" in refused("rl", "org/rl", None, None, None, [str(tmp_path / "f.json")])


@pytest.mark.parametrize("entry", [{"objective": 5}, {"sizes": 5}, {"versions": []}])
def test_a_damaged_record_of_a_run_is_one_line(entry: dict[str, Any], hub: ModelHub, tmp_path: Path) -> None:
    [name] = entry
    assert f"run.json is damaged (no valid '{name}')" in refused(changed("sft", tmp_path / "r", {}, **entry), "org/x")


@pytest.mark.parametrize("name", ["org/a--b", "org/x.git", "órg/x", "o" * 100 + "/x"])
def test_a_name_that_the_hub_does_not_take_is_refused_before_anything_is_written(name: str, hub: ModelHub) -> None:
    assert "is not a valid name on the hub" in refused("sft", name)
    assert "is not the name of a branch" in refused("sft", "org/x", "a b") and "not the name of a branch" in refused(
        "sft", "org/x", ".."
    )


def test_a_hub_that_refuses_or_is_silent_is_one_line(hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    for status, said in (
        (404, "(404)"),
        (409, "did not answer like a hub"),
        (412, "refused the request for org/x (412): refused"),
    ):
        hub.refuse["/api/repos/create"] = status
        assert said in refused("sft", "org/x")
    monkeypatch.setattr(upload, "SILENCE", 0.2)
    hub.refuse["/api/repos/create"] = 0
    assert "the hub does not answer: repeat the command later" in refused("sft", "org/x")
