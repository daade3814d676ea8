"""Logs of evaluations in the format of inspect-ai, version 2, which `inspect view` and `inspect_ai.log.read_eval_log` open.

A rollout is a sample: its task, and as epoch its number among the task's samples. The format is written directly, as its
library has some forty dependencies. NAME.json is one document; NAME.eval is a zip archive with a file for each sample.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from posttrain import __version__
from posttrain.config.inference import Evaluation
from posttrain.core import user_files
from posttrain.core.json_text import json_line
from posttrain.core.rollouts import PlayedTurn, Rollout
from posttrain.core.tool_calls import read_calls
from posttrain.core.transcripts import SpanKind
from posttrain.core.types import Invalid, StopReason, Task, UserError, succeeds
from posttrain.envs.play.episode import content_text
from posttrain.training.rollout_figures import key_of, rates
from posttrain.verify.answer import voted_answer

STOPS = {
    StopReason.EOS: "stop",
    StopReason.STOP: "stop",
    StopReason.LENGTH: "max_tokens",
    StopReason.CONTEXT: "model_length",
}
IN_SAMPLE = ("id", "prompt", "messages", "answer")
"""Columns of a task that a sample has outside its metadata."""
IN_SUMMARY = ("id", "epoch", "input", "target", "scores", "model_usage", "total_time", "working_time")
"""Fields of a sample that its summary has too."""


@dataclass(frozen=True)
class LoggedModel:
    """The results of one model of an evaluation."""

    name: str
    rollouts: Sequence[Rollout]
    figures: Mapping[str, Any]
    scores: Sequence[float | Invalid] = ()  # of `--scorer`, for each rollout; (): there is none


@dataclass(frozen=True)
class LogContent:
    """The content of a log, as JSON data."""

    model: str
    task: str
    results: list[dict[str, Any]]  # see `result`
    samples: list[dict[str, Any]]


def write_inspect_log(
    path: Path, config: Evaluation, side: LoggedModel, success: float | None, began: datetime
) -> None:
    """Write the log of one model. `success`: reward from which a reply counts as right; None: there is none.

    Raises UserError if the file cannot be written.
    """
    content = LogContent(side.name, config.env or Path(config.tasks).stem, _results(side), _samples(side, success))
    write_log(path, config, content, began)


def write_log(path: Path, config: Evaluation, content: LogContent, began: datetime) -> None:
    """Write a log. Raises UserError if the file cannot be written."""
    head = _head(config, content, began, datetime.now(UTC))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        user_files.writable(path)
        if path.suffix == ".json":
            path.write_bytes(json_line(head | {"samples": content.samples}))
        else:
            _write_archive(path, head, content.samples)
    except OSError as error:
        raise UserError(f"--inspect-log {path} cannot be written: {error.strerror}") from error


def file_of_each(path: Path, end: str, models: int) -> list[Path]:
    """Return a file beside `path` for each model: NAME.eval, NAME.against.eval, NAME.against-2.eval ..."""
    others = [f".against{f'-{number}' * (number > 1)}" for number in range(1, models)]
    return [path.with_name(f"{path.stem}{side}{end}") for side in ("", *others)]


def _write_archive(path: Path, head: Mapping[str, Any], samples: Sequence[dict[str, Any]]) -> None:
    """Write the log as an archive, of which a reader opens single samples."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("_journal/start.json", json_line({name: head[name] for name in ("version", "eval", "plan")}))
        for sample in samples:
            archive.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", json_line(sample))
        archive.writestr("summaries.json", json_line([_summary(sample) for sample in samples]))
        archive.writestr("header.json", json_line(head))


def _summary(sample: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: sample[name] for name in IN_SUMMARY if name in sample}
    failed = {"error": sample["error"]["message"]} if "error" in sample else {}
    return own | failed | {"completed": True, "message_count": len(sample["messages"])}


def _head(config: Evaluation, content: LogContent, began: datetime, ended: datetime) -> dict[str, Any]:
    """Return the log without its samples."""
    task, created, samples = content.task, began.isoformat(), content.samples
    sampling = {name: getattr(config, name) for name in ("temperature", "top_p", "top_k", "max_tokens", "seed")}
    sampling |= {"stop_seqs": config.stop} if config.stop else {}
    ids = list(dict.fromkeys(sample["id"] for sample in samples))
    run, valid = _identity(created, config.model, task), sum("error" not in sample for sample in samples)
    used = Counter[str]()
    for sample in samples:
        used.update(sample.get("model_usage", {}).get(content.model, {}))
    spec = {
        "eval_id": _identity(run, content.model),
        "run_id": run,
        "created": created,
        "task": task,
        "task_id": _identity(task, config.tasks),
        "dataset": {"name": Path(config.tasks).name, "location": config.tasks, "samples": len(ids), "sample_ids": ids},
        "model": content.model,
        "model_generate_config": sampling,
        "config": {"epochs": max((sample["epoch"] for sample in samples), default=1)},
        "packages": {"posttrain": __version__},
        "metadata": {name: getattr(config, name) for name in sorted(config.given)},
    }
    return {
        "version": 2,
        "status": "success",
        "eval": spec,
        "plan": {"name": "posttrain eval", "steps": [], "config": sampling},
        "results": {"total_samples": len(samples), "completed_samples": valid, "scores": content.results},
        "stats": {
            "started_at": created,
            "completed_at": ended.isoformat(),
            "model_usage": {content.model: dict(used)} if used else {},
        },
    }


def _identity(*of: str) -> str:
    return hashlib.blake2b("\0".join(of).encode(), digest_size=11).hexdigest()


def _results(side: LoggedModel) -> list[dict[str, Any]]:
    """Return the figures: first accuracy and those that count right replies, each with the limits of its interval."""
    found = []
    for name, figure in side.figures.items():
        if isinstance(figure, Mapping):
            limits = {end: figure[end] for end in ("mean", "low", "high") if figure.get(end) is not None}
            found.append(result(name, "accuracy" if "@" in name else name, limits, figure.get("tasks")))
    for name, mean in rates(side.rollouts).items():
        if name.startswith("part/"):
            part = f"reward/{name.removeprefix('part/')}"
            found.append(result(part, part, {"mean": mean}))
    return sorted(found, key=lambda one: one["scorer"] != "accuracy")


def result(name: str, scorer: str, metrics: Mapping[str, float], scored: int | None = None) -> dict[str, Any]:
    """Return a figure of a log. `scorer`: the score of samples that it belongs to; `scored`: number of tasks."""
    told = {metric: {"name": metric, "value": value} for metric, value in metrics.items()}
    return {"name": name, "scorer": scorer, "metrics": told} | ({} if scored is None else {"scored_samples": scored})


def _samples(side: LoggedModel, success: float | None) -> list[dict[str, Any]]:
    """Return the samples, in the order of the rollouts."""
    epochs: Counter[str] = Counter()
    found = []
    for place, rollout in enumerate(side.rollouts):
        epochs[key_of(rollout)] += 1
        score = side.scores[place] if side.scores else None
        found.append(_sample(side.name, rollout, epochs[key_of(rollout)], success, score))
    return found


def _sample(
    model: str, rollout: Rollout, epoch: int, success: float | None, score: float | Invalid | None
) -> dict[str, Any]:
    task, usage = rollout.task, _usage([rollout])
    begins = _of_task(task, rollout)
    messages = begins + _of_turns(rollout.turns[1:] if begins else rollout.turns, model)
    seconds = sum(turn.seconds for turn in rollout.turns) + rollout.seconds
    said = next((message for message in reversed(messages) if message["role"] == "assistant"), None)
    choice = {
        "message": said or {"role": "assistant", "content": rollout.text},
        "stop_reason": STOPS.get(rollout.stop, "unknown"),
    }
    notes = {"notes": rollout.notes} if rollout.notes else {}
    sample = {
        "id": key_of(rollout),
        "epoch": epoch,
        "input": begins or rollout.prompt,
        "target": str(task.get("answer", "")),
        "messages": messages,
        "output": {"model": model, "choices": [choice], "completion": rollout.text, "usage": usage},
        "scores": _scores(rollout, success, score),
        "metadata": {name: _plain(value) for name, value in task.items() if name not in IN_SAMPLE}
        | {"stop": str(rollout.stop)}
        | notes,
        "model_usage": {model: usage},
        "total_time": seconds,
        "working_time": seconds,
    }
    if isinstance(rollout.reward, Invalid):
        reason = f"invalid reward: {rollout.reward.reason}"
        sample["error"] = {"message": reason, "traceback": reason, "traceback_ansi": reason}
    return sample


def _plain(value: Any) -> Any:
    return f"{len(value)} bytes" if isinstance(value, bytes) else value


def _scores(rollout: Rollout, success: float | None, score: float | Invalid | None) -> dict[str, Any]:
    """Return the scores of a sample: whether it is right, its reward, the parts of that, and the score of `--scorer`."""
    found: dict[str, float] = {}
    if not isinstance(rollout.reward, Invalid):
        found |= {} if success is None else {"accuracy": int(succeeds(rollout.outcome, success))}
        found |= {"reward": rollout.reward} | {f"reward/{name}": value for name, value in rollout.rewards.items()}
    if score is not None and not isinstance(score, Invalid):
        found["score"] = score
    answer = voted_answer(rollout.text)
    return {name: {"value": value, "answer": answer} for name, value in found.items()}


def _usage(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Return the tokens that these rollouts have sampled, and all others of their contexts."""
    sampled = sum(rollout.n_sampled for rollout in rollouts)
    total = sum(len(transcript) for rollout in rollouts for transcript in rollout.transcripts)
    return {"input_tokens": total - sampled, "output_tokens": sampled, "total_tokens": total}


def _of_task(task: Task, rollout: Rollout) -> list[dict[str, Any]]:
    """Return the messages of the task, if they are the first turn; else []."""
    given = task.get("messages") or ()
    if not rollout.turns or rollout.turns[0].text != "\n".join(map(content_text, given)):
        return []
    found = []
    for message in given:
        role = "system" if message["role"] == "developer" else message["role"]
        own: dict[str, Any] = {"role": role, "content": content_text(message), "source": "input"}
        if message.get("tool_calls"):
            calls = [(call.get("id") or "", call["function"]) for call in read_calls(message["tool_calls"])]
            own["tool_calls"] = [_call(id, function["name"], function["arguments"]) for id, function in calls]
        found.append(own | {name: message[name] for name in ("tool_call_id",) if name in message})
    return found


def _of_turns(turns: Sequence[PlayedTurn], model: str) -> list[dict[str, Any]]:
    """Return a message for each turn. The roles of what an environment shows are not recorded: it is a user's, or a
    tool's.
    """
    found: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        message: dict[str, Any] = {"role": "user", "content": turn.text, "source": "input"}
        if turn.kind is SpanKind.SAMPLED:
            calls = [
                _call(call.id or f"call-{number}-{place}", call.name, call.arguments, call.problem)
                for place, call in enumerate(turn.calls)
            ]
            message |= {"role": "assistant", "source": "generate", "model": model}
            message |= {"tool_calls": calls} if calls else {}
        elif turn.kind is SpanKind.TOOL:
            message |= {"role": "tool"}
            message |= {"tool_call_id": calls[0]["id"], "function": calls[0]["function"]} if calls else {}
        found.append(message)
    return found


def _call(id: str, function: str, arguments: Mapping[str, Any], problem: str | None = None) -> dict[str, Any]:
    call = {"id": id, "function": function, "arguments": dict(arguments), "type": "function"}
    return call if problem is None else call | {"parse_error": problem}
