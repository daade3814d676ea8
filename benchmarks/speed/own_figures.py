"""The parts that look at posttrain for itself: share of the peak, memory beside the vocabulary, start, growth.

Memory and start have TRL's figures beside them.
"""

from __future__ import annotations

import json
import math
import subprocess
import time
from pathlib import Path
from typing import Any

from flops import config_of, forward
from plan import Plan
from processes import ROOT, Machine, Side, Sides
from tables import Figure, Goal, Table, number
from work import CASES, GROUP, PROMPTS, REQUESTS, requests, rows, tasks, tokens_of

from posttrain.models.native.decoder_flops import BACKWARD, trunk
from posttrain.models.native.decoder_shape import DecoderConfig

# -- share of the peak -------------------------------------------------------------------------------------------------


def peak(machine: Machine, plan: Plan) -> list[Table]:
    """Useful FLOP per second beside what the machine's matrix products reach in the same round; weights read per second."""
    table = Table(
        "Share of the measured peak of matrix products (float32)",
        ("model, work", "GFLOP/s, useful", "GFLOP/s, peak", "share, %", "goal"),
        notes=[
            "Useful: prompts once per group, output head at scored tokens only, the causal half of attention, no padding, "
            "no recomputation. Updates: the ragged work, 3 forward passes' worth. Prefill: 64 different prompts."
        ],
    )
    reading = Table(
        "One request at a time: weights read, beside the best product of a large matrix and a vector (float32)",
        ("model", "GB/s, weights", "GB/s, peak", "share, %", "goal"),
    )
    for model in plan.models:
        folder = machine.model(model)
        useful = {"update": BACKWARD * _flops(folder, "ragged"), "prefill": _of_prompts(folder)}
        useful |= {case: _flops(folder, case) for case in CASES}
        config = config_of(folder)
        weights = 4 * (trunk(config) + config.vocab * config.hidden)
        rates: dict[str, list[float]] = {name: [] for name in ("peak", *useful, "bandwidth", "weights")}
        with Sides(machine) as sides:
            side = sides.start("posttrain", "serve", model=folder)
            for first in (True, *[False] * plan.rounds["peak"][model]):
                best = side.ask(do="peak")
                found = {"peak": best["flops"], "bandwidth": best["bandwidth"]}
                found["weights"] = weights / side.ask(do="decode", running=1, compiled=True)["seconds"]
                for work in ("update", "prefill"):
                    found[work] = useful[work] / side.ask(do=work)["seconds"]
                for case in CASES:
                    found[case] = useful[case] / side.ask(do="sample", case="warm" if first else case)["seconds"]
                if not first:
                    for name, rate in found.items():
                        rates[name].append(rate / 1e9)
        top = Figure.of(rates["peak"])
        for name in useful:
            rate = Figure.of(rates[name])
            share = Figure.of([100 * x for x in rate.over(top).values])
            goal = Goal(40 if name in CASES else 70, unit="%").judge(share.median)
            table.add(f"{model}, {'sampling, ' + name if name in CASES else name}", rate, top, share, goal)
        rate, top = Figure.of(rates["weights"]), Figure.of(rates["bandwidth"])
        share = Figure.of([100 * x for x in rate.over(top).values])
        reading.add(model, rate, top, share, Goal(60, unit="%").judge(share.median))
    return [table, reading]


def _of_prompts(folder: str) -> float:
    """FLOP of reading the prompts of the action `prefill`, and of a token for each."""
    lengths = map(len, tokens_of(folder, [row["prompt"] for row in rows(REQUESTS)]))
    return forward(config_of(folder), [(length, [1]) for length in lengths])


def _flops(folder: str, case: str) -> float:
    """FLOP of a forward pass over the requests of a case."""
    wanted = requests(case)
    lengths = [len(ids) for ids in tokens_of(folder, [text for text, _ in wanted[::GROUP]])]
    replies = [[n for _, n in wanted[i * GROUP : (i + 1) * GROUP]] for i in range(PROMPTS)]
    return forward(config_of(folder), list(zip(lengths, replies, strict=True)))


# -- where the time goes -----------------------------------------------------------------------------------------------

RUNNING = (1, 8, 32, 64)


def profile(machine: Machine, plan: Plan) -> list[Table]:
    """What limits updates and sampling: shares of the time by kind of operation, and decoding steps of few and many."""
    updates = _Shares("Where an update's time goes: % of the time inside operations, by torch.profiler, one repeat")
    sampling = _Shares("Where sampling's time goes: % of all of it, one repeat")
    steps = Table(
        "A decoding step, milliseconds",
        ("model, means", *(f"{n} running" for n in RUNNING)),
        notes=["Prompts and the packing of weights included. operations: torch's, where no C compiler is found."],
    )
    for model in plan.models:
        with Sides(machine) as sides:
            side = sides.start("posttrain", "serve", model=machine.model(model))
            updates.add(model, side.ask(do="profile"))
            for case in CASES:
                sampling.add(f"{model}, {case}", side.ask(do="phases", case=case))
            laps: dict[tuple[bool, int], list[float]] = {}
            for _ in range(plan.rounds["peak"][model]):
                for running in RUNNING:
                    for compiled in (True, False):
                        lap = side.ask(do="decode", running=running, compiled=compiled)["seconds"]
                        laps.setdefault((compiled, running), []).append(1000 * lap)
        for compiled in (True, False):
            cells = [Figure.of(laps[compiled, running]) for running in RUNNING]
            steps.add(f"{model}, {'compiled' if compiled else 'operations'}", *cells)
    return [updates.table(), sampling.table(), steps]


class _Shares:
    """A table of shares of a time, by kind of work; without kinds that come to nothing anywhere."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.found: dict[str, dict[str, float]] = {}

    def add(self, name: str, shares: dict[str, float]) -> None:
        if shares:
            self.found[name] = shares

    def table(self) -> Table:
        kinds = dict.fromkeys(kind for shares in self.found.values() for kind, share in shares.items() if share >= 0.01)
        table = Table(self.title, ("model, work", *kinds))
        for name, shares in self.found.items():
            table.add(name, *(f"{100 * shares[kind]:.0f}" for kind in kinds))
        return table


# -- memory beside the vocabulary --------------------------------------------------------------------------------------

SHORT = 64  # tokens of each reply
LARGEST_OF_TRL = 32768  # beyond that it would take more memory than most machines have


def memory(machine: Machine, plan: Plan) -> list[Table]:
    """Most memory of a GRPO step under vocabularies of several sizes."""
    table = Table(
        f"Most memory of a GRPO step beside the vocabulary: the 5 M trunk, {REQUESTS} replies of {SHORT} tokens, MiB added",
        (
            "vocabulary",
            "posttrain",
            "of it work",
            f"TRL, {plan.memory_way} at once",
            "ratio",
            "goal",
        ),
        notes=[
            "Added: over imports and one loaded model. Work: without gradients and AdamW's moments (12 bytes a parameter), "
            "which grow with the vocabulary in any trainer."
        ],
    )
    work = {}
    for vocabulary in plan.vocabularies:
        model = machine.model(f"vocab-{vocabulary}")
        added = _added(machine, "posttrain", model=model, reward="signal")
        state = 12 * _parameters(config_of(model)) / (1 << 20)
        work[vocabulary] = added - state
        cells = [""] * 3
        if vocabulary <= LARGEST_OF_TRL:
            theirs = _added(machine, "trl", model=model, way=plan.memory_way)
            ratio = added / theirs
            cells = [number(theirs), number(ratio), Goal(0.4, least=False).judge(ratio)]
        table.add(f"{vocabulary:,}", number(added), number(work[vocabulary]), *cells)
    growth = work[max(work)] / work[min(work)]
    flat = Goal(1.25, least=False).judge(growth)
    table.notes.append(
        f"Flat in the vocabulary: work grows {number(growth)}x from {min(work):,} to {max(work):,} ({flat})."
    )
    return [table]


def _added(machine: Machine, name: str, **settings: Any) -> float:
    with Sides(machine) as sides:
        side = sides.start(name, "grpo", max_tokens=SHORT, **settings)
        return float(side.ask()["added"])


def _parameters(config: DecoderConfig) -> int:
    return trunk(config) + config.vocab * config.hidden  # tied; norms and biases are not worth counting


# -- start -------------------------------------------------------------------------------------------------------------


def start(machine: Machine, plan: Plan) -> list[Table]:
    """Seconds until a run has finished its first step, and what the imports take of them."""
    table = Table(
        "Start, seconds (a random model of 0.1 M parameters, 8 prompts x 8 rollouts of at most 64 tokens)",
        ("", "posttrain", "TRL", "ratio", "goal"),
        notes=["From the command to the first finished step: `posttrain rl ...`, and a script with TRL's trainer."],
    )
    first: dict[str, list[float]] = {"ours": [], "theirs": []}
    imports: dict[str, list[float]] = {"ours": [], "theirs": []}
    for place in range(-1, plan.starts):  # the first round only fills the file cache
        found = {"ours": (_first_step(machine), _import(machine, machine.ours, "import posttrain.training.verbs.rl"))}
        if place < plan.starts_of_trl:
            statement = "from trl import GRPOConfig, GRPOTrainer"
            found["theirs"] = (_first_step_of_trl(machine), _import(machine, machine.trl, statement))
        for name, (step, brought) in found.items() if place >= 0 else ():
            first[name].append(step)
            imports[name].append(brought)
    for what, seconds, goal in (("first finished step", first, 3.0), ("imports", imports, 2.0)):
        ours, theirs = Figure.of(seconds["ours"]), Figure.of(seconds["theirs"])
        table.add(what, ours, theirs, ours.over(theirs), Goal(goal, least=False, unit=" s").judge(ours.median))
    return [table]


def _first_step(machine: Machine) -> float:
    """`posttrain rl`, until its record holds a finished step."""
    folder = machine.place / "scratch" / "start"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks()))
    timing = folder / "run" / "timing.jsonl"
    timing.unlink(missing_ok=True)
    command = [
        machine.ours.with_name("posttrain"), "rl", "--model", machine.model("tiny"), "--tasks", folder / "tasks.jsonl",
        "--env", f"{Path(__file__).with_name('rewards.py')}:signal", "--out", folder / "run", "--overwrite",
        "--steps", "1", "--prompts", str(PROMPTS), "--group", str(GROUP), "--max-tokens", str(SHORT), "--kl", "0",
        "--threads", str(machine.threads),
    ]  # fmt: skip
    begin = time.perf_counter()
    with (machine.place / "logs" / "start.txt").open("w") as log:
        process = subprocess.Popen(
            [str(c) for c in command], stdout=log, stderr=log, env=machine.environment(), cwd=ROOT
        )
        while process.poll() is None and not (timing.exists() and timing.stat().st_size):
            time.sleep(0.002)
        seconds = time.perf_counter() - begin
        assert process.wait() == 0, (machine.place / "logs" / "start.txt").read_text()
    return seconds


def _first_step_of_trl(machine: Machine) -> float:
    begin = time.time()
    with Sides(machine) as sides:
        side = sides.start("trl", "start", model=machine.model("tiny"), max_tokens=SHORT)
        return float(side.first["now"]) - begin


def _import(machine: Machine, python: Path, statement: str) -> float:
    begin = time.perf_counter()
    subprocess.run([python, "-c", statement], check=True, env=machine.environment(), cwd=ROOT, capture_output=True)
    return time.perf_counter() - begin


# -- growth ------------------------------------------------------------------------------------------------------------


def growth(machine: Machine, plan: Plan) -> list[Table]:
    """Long contexts, and what a group pays for its prompt."""
    with Sides(machine) as sides:
        side = sides.start("posttrain", "serve", model=machine.model("long"))
        return [_contexts(side, plan), _prompts(side)]


def _contexts(side: Side, plan: Plan) -> Table:
    table = Table(
        f"Growth with the context: {GROUP} rollouts of one prompt that fill it, tokens per second",
        ("context", "sampling", "update", "both", "time per token, relative", "goal"),
    )
    side.ask(do="context", length=plan.contexts[0] // 2)
    found: dict[int, list[dict[str, Any]]] = {context: [] for context in plan.contexts}
    for _ in range(plan.rounds["growth"]["long"]):
        for context in plan.contexts:
            found[context].append(side.ask(do="context", length=context))
    whole = {c: Figure.of([x["tokens"] / x["seconds"] for x in laps]) for c, laps in found.items()}
    exponent = _exponent([(x["tokens"], x["seconds"]) for laps in found.values() for x in laps])
    for context, laps in found.items():
        parts = [Figure.of([x["tokens"] / x[name] for x in laps]) for name in ("sampling", "update")]
        relative = whole[plan.contexts[0]].over(whole[context])
        last = context == plan.contexts[-1]
        goal = Goal(1.1, least=False, unit="").judge(exponent).replace("<=", "exponent <=") if last else ""
        table.add(f"{context:,}", *parts, whole[context], relative, goal)
    table.notes.append(
        f"Seconds grow as tokens to the power of {exponent:.2f} (1: linear; attention alone would be 2)."
    )
    return table


def _exponent(pairs: list[tuple[float, float]]) -> float:
    """Slope of log seconds over log tokens, by least squares."""
    x, y = [math.log(tokens) for tokens, _ in pairs], [math.log(seconds) for _, seconds in pairs]
    a, b = sum(x) / len(x), sum(y) / len(y)
    return sum((u - a) * (v - b) for u, v in zip(x, y, strict=True)) / sum((u - a) ** 2 for u in x)


def _prompts(side: Side) -> Table:
    prompt, reply, rounds = 1024, 16, 5
    table = Table(
        f"What a group pays for its prompt of {prompt:,} tokens, replies of {reply} tokens, seconds",
        ("rollouts", "sampling", "update", "both", "relative to one rollout"),
    )
    groups = (1, 4, 16)
    found: dict[int, list[dict[str, Any]]] = {group: [] for group in groups}
    for measured in (False, *[True] * rounds):
        for group in groups:
            lap = side.ask(do="prompt", length=prompt, reply=reply, group=group)
            found[group] += [lap] if measured else []
    seconds = {g: Figure.of([x["seconds"] for x in laps]) for g, laps in found.items()}
    for group, laps in found.items():
        parts = [Figure.of([x[name] for x in laps]) for name in ("sampling", "update")]
        table.add(str(group), *parts, seconds[group], seconds[group].over(seconds[1]))
    table.notes.append("A prompt computed once per rollout would make 16 rollouts cost about 16 times one.")
    return table
