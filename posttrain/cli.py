"""The command `posttrain`: verbs over the front door. Nothing heavy is imported before the verb that needs it.

Exit codes: 0 done, 1 our own mistake (with a traceback), 2 the user's (one line), 130 interrupted (and saved).
"""

from __future__ import annotations

import difflib
import json
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from cyclopts.config import Dict
from cyclopts.exceptions import CycloptsError

from posttrain.config import RL, SFT, Evaluation
from posttrain.types import UserError

app = App(
    name="posttrain",
    help="Post-training for language models: supervised fine-tuning, reinforcement learning, evaluation.\n\n"
    "Options may stand in a recipe: `posttrain rl --config recipe.toml --steps 100` takes them from its table `[rl]`, "
    "and what is on the command line wins.",
    version="0.1.0",
    help_flags=["--help", "-h"],
)
Options = Parameter(name="*", consume_multiple=True)
VERBS: dict[str, type] = {"sft": SFT, "rl": RL, "eval": Evaluation}


@app.command
def sft(config: Annotated[SFT, Options] = SFT()) -> int:  # noqa: B008  frozen
    """Supervised fine-tuning: imitate the responses of a dataset."""
    from posttrain import run

    return _ended(run.sft(config))


@app.command
def rl(config: Annotated[RL, Options] = RL()) -> int:  # noqa: B008
    """Reinforcement learning from a reward function, a verifier or an environment."""
    from posttrain import run

    return _ended(run.rl(config))


@app.command(name="eval")
def evaluate(config: Annotated[Evaluation, Options] = Evaluation()) -> int:  # noqa: B008
    """Mean reward, accuracy and pass@k on a set of tasks, with intervals; --against compares two checkpoints."""
    from posttrain import run
    from posttrain.display import table

    found = run.evaluate(config)
    names = [n for n in found.figures if isinstance(found.figures[n], dict)]

    def row(name: str, figures: dict[str, Any]) -> list[str]:
        return [name, *(_interval(figures[n]) for n in names)]

    rows = [row(config.model, found.figures)]
    if found.against is not None:
        rows.append(row(config.against or "", found.against))
    table(f"{found.figures['tasks']} tasks, {config.samples} samples each", ["model", *names], rows)
    if found.difference is not None:
        print(f"difference in accuracy, task by task: {_interval(found.difference)} (95% interval)")
    if found.invalid:
        print(f"{found.invalid} rewards were invalid and left out")
    if config.out:
        content = {
            "figures": found.figures,
            "against": found.against,
            "difference": found.difference,
            "rewards": found.rewards,
        }
        Path(config.out).parent.mkdir(parents=True, exist_ok=True)
        Path(config.out).write_text(json.dumps(content, indent=1) + "\n")
    return 0


@app.command
def chat(
    model: str, *, system: str | None = None, temperature: float = 0.7, max_tokens: int = 256, device: str = "auto"
) -> int:
    """Talk to a checkpoint (to one without a chat template: give it text to continue).

    Parameters
    ----------
    model
        Folder of a checkpoint or of a run.
    system
        A system message.
    temperature
        Of sampling; 0: greedy.
    max_tokens
        Most tokens of a reply.
    device
        auto, cpu, cuda ...
    """
    from posttrain.dialogue import converse

    converse(model, system, temperature, max_tokens, device)
    return 0


@app.command
def algorithms(name: str | None = None) -> int:
    """The table of algorithms, or one of them in plain mathematics.

    Parameters
    ----------
    name
        One row.
    """
    from posttrain.algorithms.policy import TABLE, find
    from posttrain.display import table

    if name is not None:
        print("\n".join(find(name).describe()))
        return 0
    rows = [[r.name, r.advantage.formula, r.surrogate.formula, getattr(r.aggregate, "formula", ""), r.paper] for r in TABLE.values()]
    table("Algorithms", ["name", "advantage", "objective per token", "weight of a token", "paper"], rows)
    return 0


@app.command
def check(
    *, env: str, tasks: str, replies: str | None = None, limit: int = 5, seconds: float = 10.0
) -> int:
    """Run a reward or an environment against sample replies, before any training.

    Parameters
    ----------
    env
        my.py:reward, package.module:name, or a built-in name.
    tasks
        Rows, as for rl.
    replies
        A text file of sample replies, one a line; left out: the task's own answer and some hostile ones.
    limit
        How many tasks to try.
    seconds
        Time limit of one call.
    """
    from posttrain.data.tasks import load_rows, to_tasks
    from posttrain.envs.check import check as run_check
    from posttrain.envs.load import load_converter

    chosen = to_tasks(load_rows(tasks, limit=limit), convert=load_converter(env))
    lines = Path(replies).read_text().splitlines() if replies else None
    report = run_check(env, chosen, lines, seconds)
    print("\n".join(report.lines()))
    return 0 if report.ok else 2


def _ended(run: Any) -> int:
    final = run.final
    shown = [f"{n} {final[n]:.4g}" for n in ("reward", "accuracy", "eval/accuracy", "nll", "eval/loss", "kl") if n in final]
    print(f"{'interrupted' if run.interrupted else 'done'}: {', '.join(shown)}")
    print(f"checkpoint {run.checkpoint}")
    print(f"curves     {run.path / 'curves.png'}")
    if run.interrupted:
        print("continue with the same command and --resume")
        return 130
    return 0


def _interval(figure: dict[str, float]) -> str:
    return f"{figure['mean']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]"


def _recipe(arguments: list[str]) -> list[str]:
    """Take `--config FILE` out of the arguments and make the file's tables the defaults of the verbs."""
    app.config = ()
    for i, word in enumerate(arguments):
        if word == "--config" or word.startswith("--config="):
            path, rest = (word[9:], arguments[i + 1 :]) if "=" in word else (arguments[i + 1 : i + 2], arguments[i + 2 :])
            file = Path(path if isinstance(path, str) else "".join(path))
            content = _read_recipe(file, arguments[0] if i else "")
            app.config = (Dict(content, source=str(file)),)
            return arguments[:i] + rest
    return arguments


def _read_recipe(file: Path, verb: str) -> dict[str, Any]:
    if not file.is_file():
        raise UserError(f"--config {file}: there is no such file")
    try:
        content = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file}: not valid TOML: {error}") from error
    for table, options in content.items():
        if table not in VERBS:
            raise UserError(f"{file}: [{table}] is no table of a recipe; there are {', '.join(f'[{v}]' for v in VERBS)}")
        known = [f.name for f in fields(VERBS[table])]
        for name in options:
            if name not in known:
                raise UserError(f"{file}: [{table}] has an unknown option {name!r}{_close(name, known)}")
    if verb in VERBS and verb not in content:
        raise UserError(f"{file} has no table [{verb}]; it has {', '.join(f'[{t}]' for t in content)}")
    return {verb: content[verb]} if verb in content else {}


def _close(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        result = app(_recipe(words), exit_on_error=False, print_error=False, result_action="return_value")
        return result if isinstance(result, int) else 0
    except (UserError, CycloptsError) as error:
        print("posttrain:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("posttrain: stopped", file=sys.stderr)
        return 130


def entry() -> None:
    sys.exit(main())


if __name__ == "__main__":
    entry()
