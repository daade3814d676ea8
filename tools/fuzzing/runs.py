"""Damaged run directories, to be continued, evaluated, talked to or trained on."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from random import Random

from fuzzing.case import Case
from fuzzing.mutate import LARGEST, damage_file, mutated, put_special, write_json
from fuzzing.samples import REWARD, copy, rows, write_rows
from fuzzing.usual import CHAT, CHECK, EVAL, RL


def run(random: Random, place: Path, samples: Path) -> Case:
    verb = random.choice(["sft", "rl"])
    folder = copy(samples, f"run-{verb}", place)
    copy(samples, "plain", place)
    write_rows(place / "rows.jsonl", rows())
    (place / "env.py").write_text(REWARD)
    if random.random() < 0.6:  # so that there is something left to do
        newest = sorted((folder / "checkpoints").iterdir())[-1]
        shutil.rmtree(newest)
    what = _damage(folder, random)
    if random.random() < 0.2:
        what += f", {_damage(folder, random)}"
    resume = [verb, "--out", f"run-{verb}", "--resume", "--quiet"]
    model = f"--model run-{verb}"
    others = [
        ["eval", *f"{EVAL} {model}".split()],
        ["chat", f"run-{verb}", *CHAT.split()],
        ["rl", *f"{RL} {model} --algorithm ppo".split()],
    ]
    words = random.choice([resume, resume, resume, random.choice(others)])
    return Case(words, f"{words[0]} {verb}: {what}", None, (), "1+2=\n\n", codes=(0, 2, 3))


def _damage(folder: Path, random: Random) -> str:
    """Damage a file of the run, or put something where nothing is expected."""
    if random.random() < 0.12:
        return _stray(folder, random)
    places = ["*.json*"] * 4 + [
        "rollouts/*",
        "checkpoints/*/*",
        "checkpoints/*/training/*",
        "tensorboard/*",
        "curves.png",
    ]
    files = [path for path in sorted(folder.glob(random.choice(places))) if path.is_file() and not path.is_symlink()]
    if not files:
        return "nothing"
    file = random.choice(files)
    name = str(file.relative_to(folder))
    if file.suffix not in (".json", ".jsonl") or random.random() < 0.4:
        what = f"{file.parent.name}/{damage_file(file, random)}"
    elif file.suffix == ".json":
        document, _, change = mutated(json.loads(file.read_text()), random)
        write_json(file, document)
        what = f"{name}: {change}"
    else:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        if not lines:
            file.write_text(random.choice(["{}\n", "[]\n", "5\n", "null\n", '{"step": "x"}\n', '{"step": 1}\n', "{"]))
            return f"{name}: a line put in"
        lines, _, change = mutated(lines, random)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        what = f"{name}: {change}"
    inside = file.parts[-2] == "training" or file.parts[-3] == "checkpoints"
    if inside and random.random() < 0.7:
        _sign(folder, file)
        what += ", signed"
    return what


def _sign(folder: Path, file: Path) -> None:
    """Make the manifest agree with a changed file, as if it had been written so."""
    checkpoint = next(parent for parent in file.parents if parent.parent.name == "checkpoints")
    manifest = checkpoint / "manifest.json"
    if not file.is_file() or file == manifest or not manifest.is_file() or manifest.stat().st_size > LARGEST:
        return
    try:
        content = json.loads(manifest.read_text())
        content["files"].items()
    except (ValueError, LookupError, AttributeError, TypeError):  # an earlier damage
        return
    if file.stat().st_size > LARGEST:
        return
    entry = {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    content["files"][str(file.relative_to(checkpoint))] = entry
    manifest.write_text(json.dumps(content))


def _stray(folder: Path, random: Random) -> str:
    """A file or folder that a person, or another program, left in the run."""
    name = random.choice(
        [
            *(
                "rollouts/step-abc.jsonl",
                "rollouts/notes.txt",
                "rollouts/step-000001.parquet.tmp",
                "rollouts/step-000009.parquet",
            ),
            *(
                "checkpoints/step-000099",
                "checkpoints/step-x",
                "checkpoints/.step-000001.draft",
                "checkpoints/notes",
                "run.json.tmp",
            ),
            *("tensorboard/x", "health.jsonl", "rollouts/step--00001.jsonl", "rollouts/step-00000²a.jsonl", "lock"),
        ]
    )
    path = folder / name
    if path.exists():
        return f"{name} is there"
    path.parent.mkdir(parents=True, exist_ok=True)
    if random.random() < 0.5:
        path.mkdir()
        return f"a folder {name}"
    path.write_bytes(random.choice([b"", b"x", b"{}\n", b"\xff", b'{"step": null}\n']))
    return f"a file {name}"


LOOKING = ("rollouts PLACE", "query PLACE QUESTION", "view PLACE --export page.html", "audit PLACE", "plan PLACE")
QUESTIONS = ("select count(*) from rollouts", "select * from rollout_index", "select * from seconds", "from metrics")


def special(random: Random, place: Path, samples: Path) -> Case:
    """Something that is no file in the place of any file of a run, of a checkpoint, or of what a command is given."""
    verb = random.choice(["sft", "rl"])
    folder = copy(samples, f"run-{verb}", place)
    copy(samples, "plain", place)
    write_rows(place / "rows.jsonl", rows())
    (place / "env.py").write_text(REWARD)
    if random.random() < 0.4:
        shutil.rmtree(sorted((folder / "checkpoints").iterdir())[-1])
    top = random.choice([folder, folder, folder, place / "plain", place])
    there = [
        path for path in sorted(top.rglob("*")) if path.is_file() and top in (place / "plain", folder, path.parent)
    ]
    absent = ["lock", "run.json.tmp", "metrics.jsonl.tmp", "health.jsonl", "rollouts/step-000002.parquet.tmp",
              "answers.jsonl", "index/000000-000049.parquet", "checkpoints/.step-000002.draft", "report.json"]  # fmt: skip
    file = folder / random.choice(absent) if random.random() < 0.2 else random.choice(there)
    what = f"{file.relative_to(place)}: {put_special(file, random)}"
    own = f"run-{verb}"
    looked = random.choice(LOOKING).split()
    choices = [
        [verb, "--out", own, "--resume", "--quiet"],
        [verb, "--out", own, "--resume", "--quiet"],
        ["eval", *f"{EVAL} --model {random.choice([own, 'plain'])}".split()],
        ["chat", random.choice([own, "plain"]), *CHAT.split()],
        ["rl", *f"{RL} --model plain --out {own} --overwrite".split()],
        ["check", *CHECK.split()],
        [random.choice(QUESTIONS) if word == "QUESTION" else own if word == "PLACE" else word for word in looked],
        [random.choice(QUESTIONS) if word == "QUESTION" else own if word == "PLACE" else word for word in looked],
    ]
    return Case(random.choice(choices), what, None, (), "1+2=\n\n", codes=(0, 1, 2, 3))
