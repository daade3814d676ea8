"""Every source of reward with every way to assign credit, on one small task: a run in every cell that exists.

    python recipes/grid.py [--seeds 0 1 2] [--out runs/grid] [--page docs/results/grid.md]

The task is the sums of `common_tasks`. The sources see the same number of the policy's replies in every cell: while it
learns, or all of them from the start, for pairs and imitation. Every cell begins with the same start, and is measured by the
exact answer on held-out tasks, whatever rewarded it. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from common_tasks import SUMS
from pages import over_seeds, with_seeds, write_page
from results_file import ResultsFile

import posttrain
from posttrain import Invalid, Rollout
from posttrain.core.seeds import seed_of
from posttrain.core.types import Task
from posttrain.envs.builtin import arithmetic
from posttrain.runs.run_reading import read_run
from posttrain.training.trainer import Run

Row = dict[str, Any]

ASKED = 3000  # tasks whose replies are labelled for reward models and verifiers, SAMPLED each
SAMPLED = 4
ERRS = 0.1  # how often the judge's verdict is wrong
STEPS = 30
QUIET: dict[str, Any] = {"threads": 1, "quiet": True, "overwrite": True, "save_every": 10**6}
LEARNING: dict[str, Any] = {
    **SUMS.common,
    **QUIET,
    "steps": STEPS,
    "eval_every": 0,
    "record": "tokens",
}
OFFLINE: dict[str, Any] = {"rows": 32, "epochs": 4.0, "warmup": 10, "schedule": "linear", "betas": (0.9, 0.95), **QUIET}
DPO_RATE, SFT_RATE = 1e-3, 1e-3
REWARD_MODEL: dict[str, Any] = {"lr": 1e-3, "rows": 64, "epochs": 6, "warmup": 50, "schedule": "linear", **QUIET}
VERIFIER: dict[str, Any] = {
    **{"tokenizer": "characters", "hidden": 64, "heads": 4, "layers": 2, "context": 32, "betas": (0.9, 0.95)},
    **{"rows": 64, "epochs": 10, "lr": 5e-3, "warmup": 50, "schedule": "linear", **QUIET},
}
TEMPLATE, MARKER, WORDS = "{prompt}{response}\n", "?", ("y", "n")

CREDIT = {
    "critic + GAE": "ppo",
    "group statistics": "grpo",
    "leave-one-out": "rloo",
    "every token": "",
    "offline pairs": "dpo",
    "imitation": "sft",
}
"""Way to assign credit -> algorithm. Every token: what a teacher thinks of it."""
RULE, MODEL = "rule", "reward model"
JUDGE, VERIFIED, TEACHER, PREFERENCES = "judge", "generative verifier", "teacher", "preferences"
SOURCES = (RULE, MODEL, JUDGE, VERIFIED, TEACHER, PREFERENCES)


OFFLINE_CREDIT = ("offline pairs", "imitation")


def cells() -> Iterator[tuple[str, str]]:
    """The cells of the grid that exist, those first that others need."""
    for source in SOURCES:
        for credit in CREDIT:
            if (source == TEACHER) == (credit == "every token") or (source == TEACHER and credit in OFFLINE_CREDIT):
                yield source, credit


@dataclass
class Grid:
    """The cells of one seed; models and replies that several of them need are made once."""

    out: Path
    seed: int
    dpo_rate: float = DPO_RATE
    sft_rate: float = SFT_RATE

    def folder(self, *words: str) -> str:
        return str(self.out / f"seed-{self.seed}" / "-".join(words).replace(" ", "-"))

    # -- what the cells begin with

    @cached_property
    def practice(self) -> list[Task]:
        return SUMS.practice(self.seed)

    @cached_property
    def start(self) -> str:
        shown = SUMS.demonstrations(self.practice, self.seed)
        return made(self.folder("start"), lambda out: posttrain.sft(shown, out=out, seed=self.seed, **self.imitation))

    @property
    def imitation(self) -> dict[str, Any]:
        return {**SUMS.imitation, **QUIET}

    @cached_property
    def labelled(self) -> list[list[tuple[str, str, bool]]]:
        """Replies of the start to tasks, in groups: prompt, reply, and whether it is right."""
        found = posttrain.evaluate(
            self.practice[-ASKED:], SUMS.env, self.start, samples=SAMPLED, k=(1,), max_tokens=LEARNING["max_tokens"],
            threads=1, env_workers=0, seed=1 + self.seed,
        )  # fmt: skip
        groups: dict[str, list[tuple[str, str, bool]]] = {}
        for r in found.rollouts:
            groups.setdefault(r.task["id"], []).append((r.task["prompt"], r.text, right_answer(r.task, r.text)))
        return list(groups.values())

    @cached_property
    def pairs(self) -> list[Row]:
        """A right reply beside a wrong one to the same task: preferences that people could have given."""
        found = []
        for group in self.labelled:
            sides = [[reply for _, reply, right in group if right == wanted] for wanted in (True, False)]
            if all(sides):
                found.append({"prompt": group[0][0], "chosen": sides[0][0], "rejected": sides[1][0]})
        return found

    # -- the sources

    def source(self, name: str, judge: Path | None) -> dict[str, Any]:
        """The options of `rl` and `eval` with which this source rewards replies."""
        if name == RULE:
            return {"env": SUMS.env}
        if name == JUDGE:
            return {"judge": (str(judge),)}
        if name == VERIFIED:
            return {"judge": (self.verifier(),)}
        return {"reward_model": (self.reward_model(name),)}

    def reward_model(self, source: str) -> str:
        if source == PREFERENCES:
            rows, algorithm = self.pairs, "bradley-terry"
        else:
            rows = [
                {"prompt": prompt, "response": reply, "label": right}
                for group in self.labelled
                for prompt, reply, right in group
            ]
            algorithm = "outcome"
        options = {"algorithm": algorithm, "seed": self.seed, **REWARD_MODEL}
        return made(
            self.folder("reward-model", source),
            lambda out: posttrain.reward_model(rows, self.start, out=out, **options),
        )

    def verifier(self) -> str:
        """The recipe of a judge that returns y or n for a reply, from imitation of labels."""
        rows = [
            {"prompt": TEMPLATE.format(prompt=prompt, response=reply), "response": f"{MARKER} {WORDS[not right]}"}
            for group in self.labelled
            for prompt, reply, right in group
        ]
        model = made(self.folder("verifier"), lambda out: posttrain.sft(rows, out=out, seed=self.seed, **VERIFIER))
        file = Path(self.folder("verifier.toml"))
        words = {"model": model, "template": TEMPLATE, "marker": MARKER, "words": list(WORDS), "answer": "probability"}
        lines = [f"{name} = {json.dumps(value)}" for name, value in words.items()]
        file.write_text("\n".join([*lines, "max_tokens = 4", ""]))
        return str(file)

    @property
    def teacher(self) -> str:
        return self.folder(RULE, "group statistics")

    # -- the cells

    def trained(self, source: str, credit: str, judge: Path | None) -> str:
        """Train a cell, and return its folder."""
        out = self.folder(source, credit)
        if credit in OFFLINE_CREDIT:
            return made(out, lambda out: self.offline(source, credit, judge, out))
        if source == TEACHER:
            how = {**LEARNING, "algorithm": "distill-reverse-kl", "seed": self.seed}
            return made(
                out, lambda out: posttrain.distill(self.practice, self.start, teacher=self.teacher, out=out, **how)
            )
        options = {**LEARNING, **self.source(source, judge), "algorithm": CREDIT[credit]}
        options |= SUMS.own.get(CREDIT[credit], {})
        return made(out, lambda out: posttrain.rl(self.practice, model=self.start, out=out, seed=self.seed, **options))

    def offline(self, source: str, credit: str, judge: Path | None, out: str) -> Run:
        """DPO on pairs, or SFT on the best replies, of as many replies as the other cells sample."""
        if source == PREFERENCES:
            pairs = self.pairs[: STEPS * LEARNING["prompts"]]
        elif source == TEACHER:
            by_teacher, own = (self.sampled(model, RULE, judge) for model in (self.teacher, self.start))
            pairs = [
                {"prompt": replies[0].task["prompt"], "chosen": replies[0].text, "rejected": own[task][0].text}
                for task, replies in by_teacher.items()
                if replies[0].text.strip()
            ]
        else:
            pairs = best_and_worst(self.sampled(self.start, source, judge).values())
        common = {"out": out, "seed": self.seed, **OFFLINE}
        if credit == "imitation":
            return posttrain.sft(chosen(pairs), model=self.start, lr=self.sft_rate, **common)
        return posttrain.prefer(pairs, self.start, algorithm="dpo", lr=self.dpo_rate, **common)

    def sampled(self, model: str, source: str, judge: Path | None) -> dict[str, list[Rollout]]:
        """As many replies as the other cells sample, with the source's reward."""
        tasks = self.practice[:3840]
        how = {
            "samples": STEPS * LEARNING["prompts"] * LEARNING["group"] // len(tasks),
            "max_tokens": LEARNING["max_tokens"],
            "k": (1,),
            "seed": self.seed,
        }
        found = posttrain.evaluate(
            tasks, model=model, threads=1, env_workers=0, success=1.0, **how, **self.source(source, judge)
        )
        of_task: dict[str, list[Rollout]] = {}
        for rollout in found.rollouts:
            of_task.setdefault(rollout.task["id"], []).append(rollout)
        return of_task

    def agreement(self, source: str, judge: Path | None) -> float:
        """How often a source ranks a right reply of the start above a wrong one of the same task (ties count half)."""
        return agreement(self.sampled(self.start, source, judge).values(), right_answer)

    def measured(self, model: str) -> float:
        found = posttrain.evaluate(
            SUMS.unseen(self.seed), SUMS.env, model, samples=4, k=(1,), threads=1, env_workers=0,
            max_tokens=LEARNING["max_tokens"],
        )  # fmt: skip
        return float(found.figures["accuracy"]["mean"])


def made(out: str, train: Any) -> str:
    """The folder of a run, trained unless it is there and whole."""
    if not (Path(out) / "run.json").exists() or not read_run(out).get("end"):
        run = train(out)
        assert not run.interrupted, "an interrupted run is no result"
    return out


def agreement(groups: Iterable[Sequence[Rollout]], right: Callable[[Mapping[str, Any], str], bool]) -> float:
    """How often rewards rank a right reply above a wrong one to the same task (ties count half)."""
    won = []
    for replies in groups:
        valid = [r for r in replies if not isinstance(r.reward, Invalid)]
        sides: tuple[list[float], list[float]] = ([], [])
        for r in valid:
            sides[right(r.task, r.text)].append(score(r))
        won += [(good > bad) + (good == bad) / 2 for bad in sides[0] for good in sides[1]]
    return sum(won) / len(won)


def best_and_worst(groups: Iterable[Sequence[Rollout]]) -> list[Row]:
    """Pairs of the best and the worst reply to each task by their reward, where they differ. `sft` takes no empty reply."""
    pairs = []
    for replies in groups:
        valid = [r for r in replies if not isinstance(r.reward, Invalid) and r.text.strip()]
        ranked = sorted(valid, key=score, reverse=True)
        if len(ranked) > 1 and score(ranked[0]) > score(ranked[-1]):
            sides = {"chosen": ranked[0], "rejected": ranked[-1]}
            cut = {f"{side}_stop": str(r.stop) for side, r in sides.items() if r.stop.truncated}  # its end is none
            pairs.append({"prompt": ranked[0].task["prompt"], **{side: r.text for side, r in sides.items()}, **cut})
    return pairs


def chosen(pairs: Sequence[Row]) -> list[Row]:
    """Rows of `sft` that imitate the better reply of each pair."""
    return [
        {"prompt": pair["prompt"], "response": pair["chosen"]}
        | ({"response_stop": pair["chosen_stop"]} if "chosen_stop" in pair else {})
        for pair in pairs
    ]


def score(rollout: Rollout) -> float:
    assert not isinstance(rollout.reward, Invalid)
    return rollout.reward


def right_answer(task: Mapping[str, Any], reply: str) -> bool:
    return arithmetic.reward(dict(task), reply) == 1.0


@contextmanager
def served_judge(out: Path) -> Iterator[Path]:
    """The recipe of a judge behind an endpoint: a program that stands in for a model and errs in one verdict of ten.

    Its verdict depends on nothing but task and reply, so it errs in the same way whenever it is asked.
    """

    class Judge(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][1]["content"]
            reply = asked.split(" reply]\n")[1].rsplit("\n[", 1)[0]
            numbers = re.search(r"(\d(?:\+\d)+)=", asked)
            last = re.search(r"(\d+)\s*\Z", reply)
            right = bool(numbers and last and int(last[1]) == sum(map(int, numbers[1].split("+"))))
            wrong = numbers is not None and seed_of("judge", numbers[1], reply) % 1000 < 1000 * ERRS
            verdict = json.dumps({"reason": "checked", "score": int(right != wrong)})
            content = json.dumps({"choices": [{"message": {"content": verdict}, "finish_reason": "stop"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    file = out / "judge.toml"
    file.write_text(
        f'endpoint = "http://127.0.0.1:{server.server_port}/v1"\nmodel = "stand-in"\ncache = false\nscale = [0, 1]\n'
        'rubric = "The last number is the sum."\n'
    )
    try:
        yield file
    finally:
        server.shutdown()
        server.server_close()


# -- the page ----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sources", nargs="+", default=list(SOURCES), choices=SOURCES, metavar="SOURCE")
    parser.add_argument("--out", type=Path, default=Path("runs/grid"))
    parser.add_argument("--dpo-rate", type=float, default=DPO_RATE)
    parser.add_argument("--sft-rate", type=float, default=SFT_RATE)
    parser.add_argument("--page", type=Path, help="page whose marked part is replaced")
    options = parser.parse_args()
    found = ResultsFile(options.out)
    with served_judge(options.out) as judge:
        for seed in options.seeds:
            grid = Grid(options.out, seed, options.dpo_rate, options.sft_rate)
            found.once(f"start {seed}", partial(grid.measured, grid.start))
            for source in SOURCES:
                if source in options.sources and source != TEACHER:
                    found.once(f"{source} agrees {seed}", partial(grid.agreement, source, judge))
            for source, credit in cells():
                if source in options.sources:
                    work = lambda g=grid, s=source, c=credit: g.measured(g.trained(s, c, judge))  # noqa: E731
                    found.once(f"{source}, {credit} {seed}", work)
                    shutil.rmtree(Path(grid.folder(source, credit)) / "tensorboard", ignore_errors=True)
    lines = table(found, options.seeds)
    print("\n".join(lines))
    if options.page:
        write_page(options.page, lines)


def table(found: Mapping[str, float], seeds: Sequence[int]) -> list[str]:
    """The grid: of each cell the mean over seeds with its 95% interval (Student)."""

    def values(name: str) -> list[float]:
        return [found[f"{name} {seed}"] for seed in seeds if f"{name} {seed}" in found]

    lines = [
        f"The start: {with_seeds(values('start'))}.",
        "",
        f"| reward from | ranks a right reply above a wrong one | {' | '.join(CREDIT)} |",
        "|---" * (len(CREDIT) + 2) + "|",
    ]
    for source in SOURCES:
        cells = [values(f"{source}, {credit}") for credit in CREDIT]
        agrees = values(f"{source} agrees")
        told = [over_seeds(own) if own else "" for own in (agrees, *cells)]
        if any(cells):
            lines.append(f"| {source} | {' | '.join(told)} |")
    lines += ["", "Every seed:", "", f"| reward from | {' | '.join(CREDIT)} |", "|---" * (len(CREDIT) + 1) + "|"]
    for source in SOURCES:
        each = [", ".join(f"{v:.3f}" for v in values(f"{source}, {credit}")) for credit in CREDIT]
        if any(each):
            lines.append(f"| {source} | {' | '.join(each)} |")
    return lines


if __name__ == "__main__":
    main()
