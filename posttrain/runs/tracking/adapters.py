"""Trackers that use the libraries of wandb, trackio, MLflow and SwanLab.

Servers, keys, offline modes and folders are set by these libraries' environment variables, such as WANDB_MODE=offline.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.core.json_text import json_text
from posttrain.runs.run_options import flat
from posttrain.runs.tracking.tracker import Status, TrackedRun, Tracker

TITLE = 60  # most characters of an alert's title: wandb allows 64
PARAMETER = 500  # most characters of a parameter's value: the limit of older MLflow servers
PARAMETERS = 100  # parameters per request to MLflow


def title(step: int, name: str) -> str:
    """Return the title of an alert."""
    return f"step {step}: {name}"[:TITLE]


class WandbTracker(Tracker):
    """Weights & Biases."""

    project_variable = "WANDB_PROJECT"

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        import wandb

        self.run = wandb.init(
            project=run.project,
            name=run.name,
            group=run.group,
            job_type=run.verb,
            id=run.id or secrets.token_hex(4),
            resume="allow" if run.id else None,
            config=dict(run.config),
            settings=wandb.Settings(console="off"),
        )
        if run.id:
            self.run.config.update(run.config, allow_val_change=True)
        return {"id": self.run.id, "url": self.run.url or ""}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def finding(self, step: int, name: str, message: str) -> None:
        self.run.alert(title(step, name), message, level="WARN")

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        data = [[step, *row.values()] for row in rows]
        self.run.log({"samples": wandb.Table(columns=["step", *rows[0]], data=data)}, step=step)

    def finish(self, status: Status) -> None:
        self.run.summary["status"] = status
        self.run.finish(exit_code=int(status == "failed"))


class TrackioTracker(Tracker):
    """trackio. It resumes runs by name, so names end with a random part."""

    project_variable = "TRACKIO_PROJECT"

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        import trackio

        self.run = trackio.init(
            run.project,
            name=run.id or f"{run.name}-{secrets.token_hex(3)}",
            group=run.group,
            config=dict(run.config),
            resume="must" if run.id else "never",
            embed=False,
        )
        return {"id": self.run.name}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def finding(self, step: int, name: str, message: str) -> None:
        self.run.alert(title(step, name), message)

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import trackio

        traces = [
            trackio.Trace(
                [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["reply"]}],
                {"reward": row["reward"]},
            )
            for row in rows
        ]
        self.run.log({"samples": traces}, step=step)

    def finish(self, status: Status) -> None:
        self.run.finish()


class MLflowTracker(Tracker):
    """MLflow. It has no alerts: findings are tags."""

    project_variable = "MLFLOW_EXPERIMENT_NAME"

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        import mlflow

        mlflow.set_experiment(run.project)
        tags = {"group": run.group, "verb": run.verb}
        begun = mlflow.start_run(run_id=run.id, run_name=None if run.id else run.name, tags=tags)
        if run.id is None:  # parameters cannot be changed later
            values = {self.named(name): str(value)[:PARAMETER] for name, value in logged_options(run.config).items()}
            names = list(values)
            for first in range(0, len(names), PARAMETERS):
                mlflow.log_params({name: values[name] for name in names[first : first + PARAMETERS]})
        return {"id": begun.info.run_id}

    @staticmethod
    def named(name: str) -> str:
        """Return the name in characters that MLflow allows."""
        return re.sub(r"[^\w\-. :/]", "_", name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        import mlflow

        mlflow.log_metrics({self.named(name): value for name, value in metrics.items()}, step=step)

    def finding(self, step: int, name: str, message: str) -> None:
        import mlflow

        mlflow.set_tag(self.named(f"finding.{step}.{name}"), message)

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import mlflow

        mlflow.log_dict({"samples": [dict(row) for row in rows]}, f"samples/step-{step:06d}.json")

    def finish(self, status: Status) -> None:
        import mlflow

        mlflow.end_run({"finished": "FINISHED", "failed": "FAILED"}.get(status, "KILLED"))


class SwanLabTracker(Tracker):
    """SwanLab. Its alerts belong to plugins of the user, so findings are texts."""

    project_variable = "SWANLAB_PROJ_NAME"

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        import swanlab

        self.run = swanlab.init(
            project=run.project,
            name=run.name,
            group=run.group,
            job_type=run.verb,
            id=run.id or secrets.token_hex(4),
            resume="allow",
            config=dict(run.config),
        )
        return {"id": self.run.id}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        import swanlab

        swanlab.log(dict(metrics), step=step)

    def finding(self, step: int, name: str, message: str) -> None:
        import swanlab

        swanlab.log_text(key=f"finding/{name}", data=message, step=step)

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import swanlab

        texts = [swanlab.Text(f"{row['prompt']}\n---\n{row['reply']}", caption=str(row["reward"])) for row in rows]
        swanlab.log({"samples": texts}, step=step)

    def finish(self, status: Status) -> None:
        import swanlab

        state = {"finished": "success", "failed": "crashed"}.get(status, "aborted")
        swanlab.finish(state, error=status if state == "crashed" else None)


def logged_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `flat` options with lists as JSON, which trackers show."""
    return {name: json_text(value) if isinstance(value, list) else value for name, value in flat(config).items()}
