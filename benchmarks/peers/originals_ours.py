"""Imports each original, trains by the recipe, and records what every update did. Runs in posttrain's environment.

python benchmarks/peers/originals_ours.py FOLDER [NAME ...]
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from originals import ORIGINALS, Original, lay_out, scaled, write_rows

from posttrain.apps.migration.migrate import recipe_for
from posttrain.cli.main import main
from posttrain.core.rollouts import PreferenceExample
from posttrain.core.transcripts import Transcript
from posttrain.learners.local_learner import LocalLearner
from posttrain.learners.optimizers import parameter_groups
from posttrain.training.sources import example_source, minibatches

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
RECORDED = ("loss", "grad_norm", "lr", "kl", "entropy/policy", "ratio/clipped_low", "ratio/clipped_high")


def _tokens(one: Transcript, last: bool) -> list[Any]:
    """[tokens, 1 for each that is trained], as both sides note a row."""
    trained = [0] * len(one)
    for span in one.spans:
        if span.learned:
            trained[span.start : span.start + span.length] = [1] * span.length
    return [one.tokens, [0] * (len(one) - 1) + [1] if last else trained]


class Recorder:
    """Records the updates of a posttrain run as its learner makes them."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.order: list[int] = []
        self.updates: list[dict[str, Any]] = []
        self.steps: list[list[list[dict[str, Any]]]] = []  # of rl: each step's updates, each a list of rollouts
        self.facts: dict[str, Any] = {}

    def rows(self, found: Sequence[tuple[int, Any]]) -> list[list[Any]]:
        self.order += [place for place, _ in found]
        texts = [made.responses if isinstance(made, PreferenceExample) else made for _, made in found]
        return [_tokens(t, self.verb == "reward-model") for row in texts for t in row]

    def learner(self, own: LocalLearner) -> None:
        plan = own.optimization
        groups = own.optimizer.param_groups
        decaying = [g for part in own.parts for g in parameter_groups(part.parameters, 1.0, 1.0, plan.choice)]
        self.facts = {
            "optimizer": plan.optimizer,
            "betas": list(plan.betas),
            "eps": plan.options.get("eps", plan.eps),
            "weight decay": plan.weight_decay,
            "numbers decayed": sum(p.numel() for g in decaying for p in g["params"] if g["weight_decay"]),
            "numbers trained": sum(p.numel() for g in groups for p in g["params"]),
            "clip": plan.max_grad_norm,
            "products": own.precision,
            "weights": str(next(iter(own.parts[0].parameters.values())).dtype).removeprefix("torch."),
        }

    def update(self, stats: dict[str, tuple[float, float]]) -> None:
        self.updates.append({name: stats[name][0] / max(1, stats[name][1]) for name in RECORDED if name in stats})


def watch(recorder: Recorder) -> contextlib.ExitStack:
    """Have the recorder told of rows, updates and the optimizer until the stack is closed."""
    stack = contextlib.ExitStack()

    def swap(owner: Any, name: str, new: Any) -> None:
        old = getattr(owner, name)
        stack.callback(setattr, owner, name, old)
        setattr(owner, name, new(old))

    def examples(old: Any) -> Any:
        def found(*given: Any) -> Any:
            got = old(*given)
            recorder.waiting = recorder.rows(got)  # type: ignore[attr-defined]
            return got

        return found

    def update(old: Any) -> Any:
        def made(self: LocalLearner, batches: Any, objective: Any) -> Any:
            if not recorder.updates:
                recorder.learner(self)
            stats = old(self, batches, objective)
            recorder.update(stats)
            if recorder.verb != "rl":
                recorder.updates[-1]["rows"] = recorder.waiting  # type: ignore[attr-defined]
            return stats

        return made

    def shuffled(old: Any) -> Any:
        def chosen(self: Any, number: int, credited: Any) -> Any:
            got = old(self, number, credited)
            recorder.steps.append([list(map(_rollout, part.rollouts, part.per_token["advantage"])) for part in got])
            return got

        return chosen

    swap(example_source, "examples_of_step", examples)
    swap(LocalLearner, "update", update)
    swap(minibatches.Minibatches, "_shuffled", shuffled)
    return stack


def _rollout(one: Any, advantage: Any) -> dict[str, Any]:
    transcript = one.transcripts[0]
    start = next(span.start for span in transcript.spans if span.learned)
    return {
        "prompt": one.prompt,
        "prompt_ids": transcript.tokens[:start],
        "reply_ids": transcript.tokens[start:],
        "reward": one.reward,
        "advantage": float(advantage[0]),
    }


def run(own: Original, place: Path) -> dict[str, Any]:
    """Import and train. Returns what happened, with the recipe's text."""
    write_rows(own, place, DATA)
    (place / own.file).write_text(scaled(own, place), encoding="utf-8")
    trainer = own.trainer if own.file == "run.yaml" else None
    draft = recipe_for(str(place / own.file), own.devices, own.rows, trainer)
    text = draft.toml(own.file, "recipe.toml")
    if own.change is not None:
        assert text.count(own.change[0]) == 1
    (place / "recipe.toml").write_text(text.replace(*own.change) if own.change else text, encoding="utf-8")
    out = place / "run"
    shutil.rmtree(out, ignore_errors=True)
    recorder = Recorder(draft.verb)
    words = [
        draft.verb,
        "--config",
        str(place / "recipe.toml"),
        "--processes",
        "1",
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    with watch(recorder), contextlib.redirect_stdout(io.StringIO()) as said:
        code = main(words)
    assert code == 0, f"{own.name}: posttrain returned {code}\n{said.getvalue()[-2000:]}"
    table = {option: value for option, (value, _) in draft.lines.items()}
    return {"recipe": text, "options": table, "order": recorder.order, "steps": recorder.steps,
            "updates": recorder.updates, **recorder.facts}  # fmt: skip


def all_of(folder: Path, names: Sequence[str]) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for own in ORIGINALS:
        if names and own.name not in names:
            continue
        place = folder / own.folder
        place.mkdir(parents=True, exist_ok=True)
        lay_out(place, DATA)
        if own.trainer == "reward" and not (place / "reward").exists():
            _with_head(place)
        sys.path.insert(0, str(place))
        with contextlib.chdir(place):
            found = run(own, place)
        sys.path.remove(str(place))
        (place / "ours.json").write_text(json.dumps(found))
        print(f"{own.name}: {len(found['updates'])} updates", flush=True)


def _with_head(place: Path) -> None:
    """Write a reward model with a random head, with which both sides start."""
    from posttrain.models.reward_model import ScoreShape, new_reward_model, settle
    from posttrain.models.tokenizer.tokenizer import Tokenizer

    model = new_reward_model(place / "model", ScoreShape(), seed=0)
    tokenizer = settle(model, Tokenizer.load(place / "model"), model.eos_ids)
    model.save(place / "reward")
    tokenizer.save(place / "reward")


if __name__ == "__main__":
    all_of(Path(sys.argv[1]).resolve(), sys.argv[2:])
