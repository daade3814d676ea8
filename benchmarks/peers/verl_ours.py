"""Imports each command of `verl_runs.py`, trains by the recipe, and records what every update did.

python benchmarks/peers/verl_ours.py FOLDER [NAME ...]

Runs in posttrain's environment, before `verl_theirs.py`.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from originals import lay_out
from originals_ours import DATA, Recorder, watch
from safetensors.torch import load_file, save_file
from verl_runs import PROMPTS, SCORE, STEPS, VERL_RUNS, VerlRun, command

from posttrain.apps.migration.migrate import recipe_for
from posttrain.apps.migration.recipe_draft import RecipeDraft
from posttrain.cli.main import main

EMBEDDING, END, STOP = "model.embed_tokens.weight", 2, 426  # of stories260K, whose head it is too


def write_rows(place: Path) -> list[dict[str, Any]]:
    """Write and return the rows, as verl has them: short prompts, each once."""
    lines = (DATA / "preferences" / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = list(dict.fromkeys(json.loads(line)["prompt"] for line in lines))
    chosen = [prompt for prompt in prompts if len(prompt) < 60][: STEPS * PROMPTS]
    assert len(chosen) == STEPS * PROMPTS
    rows = [
        {
            "data_source": "pairs",
            "prompt": [{"role": "user", "content": prompt}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": place_of},
        }
        for place_of, prompt in enumerate(chosen)
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


def imported(own: VerlRun, place: Path) -> RecipeDraft:
    """Write the command, and return its recipe."""
    words = ["python3 -m verl.trainer.main_ppo", *command(own.options(place))]
    (place / "run.sh").write_text(" \\\n    ".join(words) + "\n", encoding="utf-8")
    return recipe_for(str(place / "run.sh"), None, STEPS * PROMPTS, None)


def run(own: VerlRun, place: Path) -> dict[str, Any]:
    """Import and train. Returns what happened, with the recipe's text and the rows in the order of the updates."""
    rows = write_rows(place)
    draft = imported(own, place)
    text = draft.toml("run.sh", "recipe.toml")
    (place / "recipe.toml").write_text(text, encoding="utf-8")
    shutil.rmtree(place / "run", ignore_errors=True)
    recorder = Recorder(draft.verb)
    here = ["--processes", "1", "--device", "cpu", "--engine", "local", "--out", str(place / "run")]
    words = [draft.verb, "--config", str(place / "recipe.toml"), *here]
    with watch(recorder), contextlib.redirect_stdout(io.StringIO()) as said:
        code = main(words)
    assert code == 0, f"{own.name}: posttrain returned {code}\n{said.getvalue()[-2000:]}"
    rollouts = [r for step in recorder.steps for update in step for r in update]
    numbers = {row["prompt"][0]["content"]: number for number, row in enumerate(rows)}
    table = {option: value for option, (value, _) in draft.lines.items()}
    return {
        "recipe": text,
        "options": table,
        "rows": [rows[k] for k in dict.fromkeys(numbers[r["prompt"]] for r in rollouts)],
        "replies": [[r["prompt_ids"], r["reply_ids"]] for r in rollouts],
        "steps": recorder.steps,
        "updates": recorder.updates,
        **recorder.facts,
    }


def prepare(model: Path) -> None:
    """Have replies end at different lengths, and a token of its own for padding.

    The end token gets the embedding of the full stop, with which the model predicts it as often. verl copies the padding
    token into the model's configuration, and transformers does not train its input embedding; in this tokenizer it is
    the end token, which every prompt has.
    """
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token": "<unk>"}))
    weights = load_file(model / "model.safetensors")
    weights[EMBEDDING][END] = weights[EMBEDDING][STOP]
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def all_of(folder: Path, names: Sequence[str]) -> None:
    for own in VERL_RUNS:
        if names and own.name not in names:
            continue
        place = folder / own.folder
        place.mkdir(parents=True, exist_ok=True)
        lay_out(place, DATA)
        prepare(place / "model")
        (place / "score.py").write_text(SCORE, encoding="utf-8")
        with contextlib.chdir(place):
            found = run(own, place)
        (place / "ours.json").write_text(json.dumps(found))
        print(f"{own.name}: {len(found['updates'])} updates", flush=True)


if __name__ == "__main__":
    all_of(Path(sys.argv[1]).resolve(), sys.argv[2:])
