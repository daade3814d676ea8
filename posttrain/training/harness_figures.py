"""Figures of an evaluation harness besides posttrain's own: `posttrain eval --harness lm-eval:TASK,TASK`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from posttrain.config.harness_tasks import harness_tasks
from posttrain.config.inference import Evaluation
from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.training.inspect_log import LogContent, file_of_each, result, write_log
from posttrain.training.setup import prepare

BOOTSTRAP = 1000  # resamples for the standard error of a figure that is no mean

Figures = dict[str, dict[str, dict[str, float | None]]]
"""Task -> figure, such as "acc" or "exact_match (flexible-extract)" -> {"mean": 0.5, "stderr": 0.03}."""


def harness_figures(config: Evaluation) -> dict[str, Figures]:
    """Return the figures that the harness computes for each model of the evaluation, by its folder. With
    `--inspect-log`, write a log for each: NAME.eval, or NAME.harness.eval beside that of `--tasks`.

    Raises UserError if lm_eval is not installed, and for tasks that it cannot load.
    """
    assert config.harness is not None
    tasks = harness_tasks(config.harness)
    device = prepare(config)
    import lm_eval
    from lm_eval.tasks import TaskManager

    from posttrain.training.lm_eval_model import PosttrainLM

    try:
        manager = TaskManager(include_defaults=not all(task.endswith((".yaml", ".yml")) for task in tasks))
        loaded = list(manager.load(tasks)["tasks"].values())
    except Exception as error:  # files, the hub, and the code of tasks: anything may fail
        raise UserError(f"--harness {config.harness:.100}: {type(error).__name__}: {one_line(error)}") from error
    found: dict[str, Figures] = {}
    folders = (config.model, *config.against)
    for place, folder in enumerate(folders):
        began = datetime.now(UTC)
        model = PosttrainLM.load(folder, str(device), slots=config.slots, precision=config.precision, seed=config.seed)
        results = lm_eval.simple_evaluate(
            model,
            tasks=loaded,
            limit=config.limit,
            apply_chat_template=bool(config.chat),
            task_manager=manager,
            log_samples=config.inspect_log is not None,
            bootstrap_iters=BOOTSTRAP,
            random_seed=config.seed % 2**32,
            numpy_random_seed=config.seed % 2**32,
            torch_random_seed=config.seed,
            fewshot_random_seed=config.seed,
        )
        found[folder] = {task: _figures(own) for task, own in results["results"].items()}
        if config.inspect_log is not None:
            log = Path(config.inspect_log)
            end = f".harness{log.suffix}" if config.tasks else log.suffix
            content = harness_log(folder, config.harness, found[folder], results["samples"])
            write_log(file_of_each(log, end, len(folders))[place], config, content, began)
    return found


def _figures(told: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return the figures of a task. Keys of `told`: "acc,none", "acc_stderr,none", "alias"."""
    found: dict[str, dict[str, float | None]] = {}
    for key, value in told.items():
        name, comma, filtered = key.partition(",")
        if not comma or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = told.get(f"{name}_stderr,{filtered}")
        found[_shown(name, filtered)] = {
            "mean": float(value),
            "stderr": float(error) if isinstance(error, int | float) else None,
        }
    return found


def _shown(name: str, filtered: str) -> str:
    return name if filtered == "none" else f"{name} ({filtered})"


def harness_log(
    model: str, harness: str, figures: Figures, samples: Mapping[str, Sequence[Mapping[str, Any]]]
) -> LogContent:
    """Return the content of a log: a sample for each document, with the scores of all filters. `samples`: as the harness
    returns them, by task.
    """
    results = []
    for task, own in figures.items():
        for name, figure in own.items():
            numbers = {what: value for what, value in figure.items() if value is not None}
            results.append(result(f"{task}/{name}", f"{task}/{name}", numbers))
    found: dict[str, dict[str, Any]] = {}
    for task, documents in samples.items():
        for told in documents:
            id = f"{task}/{told['doc_id']}"
            sample = found.setdefault(id, _sample(id, model, told))
            for name in told["metrics"]:
                if isinstance(told.get(name), int | float):
                    sample["scores"][f"{task}/{_shown(name, told['filter'])}"] = {"value": told[name]}
    return LogContent(model, harness, results, list(found.values()))


def _sample(id: str, model: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with the model's reply: the text, or the likeliest choice."""
    asked = told["arguments"][0][0]
    choices = [given[1] for given in told["arguments"] if len(given) > 1 and isinstance(given[1], str)]
    target, replies = told["target"], [own[0] for own in told["resps"]]
    if choices:
        reply = max(zip(replies, choices, strict=True), key=lambda pair: pair[0][0])[1]
        target = choices[target] if isinstance(target, int) and 0 <= target < len(choices) else target
    else:
        reply = replies[0] if isinstance(replies[0], str) else ""
    said = {"role": "assistant", "content": reply, "source": "generate", "model": model}
    return {
        "id": id,
        "epoch": 1,
        "input": asked,
        "target": str(target),
        "messages": [{"role": "user", "content": asked, "source": "input"}, said],
        "output": {"model": model, "choices": [{"message": said, "stop_reason": "stop"}], "completion": reply},
        "scores": {},
        "metadata": {"document": told["doc"], "replies": replies},
    } | ({"choices": choices} if choices else {})
