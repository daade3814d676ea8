"""Runs of any size, made from the table of rollouts alone: nothing is trained. For tests and measurements of `view`.

python tests/helpers/generated_runs.py FOLDER [--steps 560] [--groups 128] [--group 8] [--tokens 3]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.core.pictures import FOLDER as PICTURES
from posttrain.core.pictures import png
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_index import open_index
from posttrain.runs.record.rollout_reading import read_file
from posttrain.runs.record.schema import NUMBERS, ROLLOUTS, SECONDS
from posttrain.runs.record.table_writer import array, numbers, write_table

WORDS = (
    "the a one little big old red blue bird cat dog bunny mouse girl boy tree house river road day night sun rain song ball "
    "went saw took made gave found lost liked said told asked played ran sat slept sang and but then so because when she he "
    "they it was had could would very happy sad tired hungry good kind again home away together . , ! ?"
).split()
ANSWERS: list[dict[str, Any]] = [
    {"service": "judge", "answer": {"reward": 4.5, "clear": 3.0, "short": 6.0}},
    {"service": "retriever", "answer": [{"id": "p1", "contents": "Rabbits\nA bunny is a young one.", "score": 2.5}]},
    {"service": "judge", "invalid": "it would rather not say"},
]
OBJECTIVE = [
    "grpo: Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300)",
    "  maximise  sum_i sum_t w_i [ min(r A, clip(r, 0.8, 1.2) A) ]",
    "  advantage A: (R_i - mean(group)) / (std(group) + 1e-06)   [DeepSeekMath, arXiv 2402.03300, section 4.1.2]",
]


def table_of(rows: Sequence[Mapping[str, Any]], schema: pa.Schema = ROLLOUTS) -> pa.Table:
    """The rows as a table; what a row does not name is null. Numbers of tokens are rounded."""
    columns = []
    for field in schema:
        values = [row.get(field.name) for row in rows]
        if field.name == "kept":
            values = [None if value is None else np.array(value, dtype=bool) for value in values]
        columns.append(numbers(values) if field.name in NUMBERS else array(values, field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def tokenizer() -> Tokenizer:
    return Tokenizer.train([" ".join(WORDS) * 40, "0123456789+-=<>/ search answer"], 400, "bpe")


def make_run(
    folder: Path,
    steps: int = 6,
    groups: int = 8,
    group: int = 8,
    tokens: int = 40,
    seed: int = 0,
    evals: int = 3,
    numbers: bool = True,
    parts: bool = True,
    agent: bool = False,
    ended: bool = True,
    spread: float = 1.0,
) -> Path:
    """A run of rl that learns. `evals`: every so many steps there is an evaluation, 0: never."""
    folder.mkdir(parents=True, exist_ok=True)
    text = tokenizer()
    text.save(folder / "checkpoints" / f"step-{steps:06d}")
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        rng = np.random.default_rng([seed, step])
        skill = 0.2 + 0.7 * step / steps
        rows = []
        for g in range(groups):
            task = (step * groups + g) % max(1, 4 * groups)
            rows += played(
                text,
                rng,
                step,
                g,
                task,
                step * groups // max(1, 4 * groups),
                group,
                tokens,
                skill,
                numbers,
                parts,
                agent,
            )
        for index, row in enumerate(rows):
            row["index"] = index
        save(folder / "rollouts" / f"step-{step:06d}.parquet", rows)
        seconds = [
            {"index": i, "reward": 0.01, "turns": [0.2 + 0.01 * n for n in range(len(r["turns"]))]}
            for i, r in enumerate(rows)
        ]
        path = folder / "seconds" / f"step-{step:06d}.parquet"
        path.parent.mkdir(exist_ok=True)
        write_table(path, table_of(seconds, SECONDS))
        line = _metrics(step, rows, skill)
        if evals and step % evals == 0:
            held = [
                played(text, rng, step, g, 10_000 + g, 0, 1, tokens, skill * spread, False, parts, agent)[0]
                for g in range(24)
            ]
            for index, row in enumerate(held):
                row |= {"index": index, "kind": "eval", "fate": None, "advantage": None, "group": f"{row['task']}#0"}
            save(folder / "evals" / f"step-{step:06d}.parquet", held)
            line["eval/reward"] = float(np.mean([r["reward"] for r in held if r["reward"] is not None]))
        lines.append(line)
    write_files(folder, lines, seed, group, ended)
    open_index(folder)
    return folder


def write_files(
    folder: Path, lines: Sequence[dict[str, Any]], seed: int, group: int, ended: bool, verb: str = "rl"
) -> None:
    config = {
        "seed": seed,
        "algorithm": "grpo",
        "settings": {"minibatches": 2},
        "group": group,
        "temperature": 1.0,
        "lr": 1e-3,
        "model": "nowhere",
        "env": "made up",
        "max_tokens": 64,
    }
    run = {
        "verb": verb,
        "start": "2026-01-01T00:00:00+00:00",
        "seed": seed,
        "config": config,
        "objective": OBJECTIVE,
        "sizes": ["model 0 parameters", f"{len(lines)} steps"],
        "steps": len(lines),
    }
    if ended:
        run |= {"end": "2026-01-01T01:00:00+00:00", "final": lines[-1] if lines else {}}
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    finding = {
        "step": max(1, len(lines) // 2),
        "name": "entropy",
        "message": "entropy fell\nusual causes: a learning rate that is too high",
    }
    (folder / "health.jsonl").write_text(json.dumps(finding) + "\n")


def save(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    write_table(path, table_of(list(rows), ROLLOUTS))


def played(
    text: Tokenizer,
    rng: np.random.Generator,
    step: int,
    place: int,
    task: int,
    visit: int,
    group: int,
    tokens: int,
    skill: float,
    numbers: bool,
    parts: bool,
    agent: bool,
) -> list[dict[str, Any]]:
    """The rollouts of a group."""
    prompt = f"task {task}: once there was a {WORDS[6 + task % 12]} that"
    begin = text.encode(prompt)
    rewards = (rng.random(group) < skill * (0.4 + 0.6 * ((task * 7919) % 97) / 97)).astype(float)
    if parts:
        rewards = 0.5 * rewards + 0.5 * (rng.random(group) < 0.5 + 0.4 * skill)
    if task % 16 == 5:  # some are never learned
        rewards[:] = 0.0
    spread = float(rewards.std())
    found = []
    for member in range(group):
        reply = " " + " ".join(rng.choice(WORDS, size=max(2, int(tokens * rng.uniform(0.5, 1.0)))))
        ids = text.encode(reply)[:tokens]
        advantage = float((rewards[member] - rewards.mean()) / (spread + 1e-6)) if spread else 0.0
        row = _row(text, begin, ids, agent)
        n = row["scored"]
        invalid = member == group - 1 and place % 7 == 6
        cut = len(ids) == tokens and not agent
        fate = "invalid" if invalid else "trained" if spread else "equal group"
        found.append(
            {
                **row,
                "step": step,
                "kind": "rl",
                "group": f"{task}#{visit}",
                "member": member,
                "epoch": visit,
                "task": str(task),
                "columns": json.dumps({"prompt": prompt, "answer": str(task % 20), "level": task % 3}),
                "prompt": prompt,
                "reward": None if invalid else float(rewards[member]),
                "invalid": "the verifier raised ValueError" if invalid else None,
                "invalid_kind": "raised" if invalid else None,
                "parts": [
                    {"name": "animal", "value": float(rewards[member] >= 0.5) / 2},
                    {"name": "full stop", "value": float(rewards[member]) - float(rewards[member] >= 0.5) / 2},
                ]
                if parts and not invalid
                else [],
                "step_rewards": [],
                "shaping": -0.1 if cut and member == 0 else 0.0,
                "penalty": 0.0,
                "used": None if invalid else float(rewards[member]) - (0.1 if cut and member == 0 else 0.0),
                "advantage": 0.0 if invalid else advantage,
                "fate": fate,
                "why": "raised" if invalid else None,
                "flags": [],
                "replayed": False,
                "stop": "length" if cut else "eos",
                "truncated": cut,
                "version": step - 1,
                "versions": [step - 1],
                "notes": json.dumps({"colour": "red"}) if member == 0 else None,
                "answers": json.dumps(ANSWERS[: 1 + agent] if member else ANSWERS[2:]),
                **(_numbers(rng, n, row["engine"], fate, advantage) if numbers and place % 4 != 3 else {}),
            }
        )
    return found


def _row(text: Tokenizer, begin: Sequence[int], ids: Sequence[int], agent: bool) -> dict[str, Any]:
    """Tokens, spans and turns: a prompt and a reply, or an episode with a call of a tool."""
    said = [("prompt", list(begin)), ("sampled", list(ids))]
    if agent:
        half = max(1, len(ids) // 2)
        result = text.encode("<search> the result of the search is 17 </search>")
        said = [
            ("prompt", list(begin)),
            ("sampled", list(ids[:half])),
            ("tool", result),
            ("sampled", list(ids[half:]) or [5]),
        ]
    tokens, spans, turns = [], [], []
    for role, own in said:
        learned = role == "sampled"
        kind = role if role in ("prompt", "sampled") else "observation"
        spans.append(
            {
                "kind": kind,
                "start": len(tokens),
                "length": len(own),
                "version": 1 if learned else None,
                "learned": learned,
            }
        )
        calls = (
            [{"tool": "search", "arguments": '{"query":"17"}', "end": 4, "problem": None}]
            if agent and role == "sampled" and len(turns) == 1
            else []
        )
        turns.append(
            {
                "role": role,
                "text": text.decode(own),
                "transcript": 0,
                "first": len(tokens),
                "length": len(own),
                "reward": 0.0,
                "cut": 0,
                "calls": calls,
            }
        )
        tokens += own
    sampled = sum(len(own) for role, own in said if role == "sampled")
    rng = np.random.default_rng(len(tokens))
    return {
        "tokens": np.array(tokens, dtype=np.int32),
        "transcripts": [len(tokens)],
        "spans": spans,
        "turns": turns,
        "pictures": [],
        "media": [],
        "engine": -rng.exponential(0.7, sampled).astype(np.float32),
        "sampled": sampled,
        "scored": sampled,
        "length": sampled,
        "total": len(tokens),
        "text": "".join(t["text"] for t in turns if t["role"] == "sampled"),
        "side": None,
    }


def _numbers(rng: np.random.Generator, n: int, engine: np.ndarray, fate: str, advantage: float = 1.0) -> dict[str, Any]:
    before = engine + rng.normal(0, 1e-4, n).astype(np.float32)
    learner = before + rng.normal(0, 0.08, n).astype(np.float32)
    own = {
        "before": before,
        "learner": learner,
        "reference": before - rng.normal(0, 0.2, n).astype(np.float32),
        "entropy": rng.exponential(0.9, n).astype(np.float32),
        "weight": np.full(n, 0.0 if fate != "trained" else advantage / (64 * n), dtype=np.float32),
        "after": np.minimum(before + rng.normal(0, 0.15, n), -1e-6).astype(np.float32),
    }
    assert own.keys() <= set(NUMBERS)
    return own


def _metrics(step: int, rows: Sequence[dict[str, Any]], skill: float) -> dict[str, Any]:
    rewards = [r["reward"] for r in rows if r["reward"] is not None]
    return {
        "step": step,
        "reward": float(np.mean(rewards)),
        "accuracy": float(np.mean([r >= 1 for r in rewards])),
        "length": float(np.mean([r["sampled"] for r in rows])),
        "entropy": 1.2 * math.exp(-2 * skill),
        "grad_norm": 1 + 0.2 * math.sin(step),
        "truncated": float(np.mean([r["truncated"] for r in rows])),
        "invalid": float(np.mean([r["reward"] is None for r in rows])),
        "ratio/max": 1.4,
        "ratio/min": 0.7,
        "kl": 0.01 * step,
        "loss": 0.1,
        "advantage/std": 0.9,
        "updates": 2.0,
    }


def make_items(folder: Path, steps: int = 3, items: int = 6, seed: int = 0) -> Path:
    """A run of prefer: items with a chosen and a rejected response."""
    text = tokenizer()
    text.save(folder / "checkpoints" / f"step-{steps:06d}")
    lines = []
    for step in range(1, steps + 1):
        rng, rows = np.random.default_rng([seed, step]), []
        for item in range(items):
            prompt = f"item {item}: tell me of a {WORDS[6 + item]}"
            for member in (0, 1):
                ids = text.encode(" " + " ".join(rng.choice(WORDS, size=18)))
                row = _row(text, text.encode(prompt), ids, False)
                numbers = _numbers(rng, row["scored"], row["engine"], "trained")
                rows.append(
                    {
                        **row,
                        "step": step,
                        "index": len(rows),
                        "kind": "prefer",
                        "group": f"item-{item}",
                        "member": member,
                        "epoch": step - 1,
                        "task": f"item-{item}",
                        "prompt": prompt,
                        "columns": "{}",
                        "fate": "trained",
                        "flags": [],
                        "parts": [],
                        "label": json.dumps({"comparisons": [[0, 1, 1.0, 0.0]], "labels": []}),
                        "engine": None,
                        "sampled": 0,
                        "learner": numbers["learner"],
                        "reference": numbers["reference"],
                        "weight": numbers["weight"] * (1 if member == 0 else -1),
                    }
                )
        save(folder / "rollouts" / f"step-{step:06d}.parquet", rows)
        lines.append(
            {
                "step": step,
                "loss": 0.7 - 0.1 * step,
                "accuracy": 0.5 + 0.1 * step,
                "margin": 0.1 * step,
                "logp_per_token/chosen": -1.0,
                "logp_per_token/rejected": -1.2,
            }
        )
    write_files(folder, lines, seed, 2, True, "prefer")
    return folder


def make_seen(folder: Path) -> Path:
    """A run whose prompts have a picture in them."""
    make_run(folder, steps=1, groups=2, group=2, evals=0)
    drawn = png(np.arange(12 * 12 * 3, dtype=np.uint8).reshape(12, 12, 3))
    digest = hashlib.sha256(drawn).hexdigest()
    (folder / PICTURES).mkdir()
    (folder / PICTURES / digest).write_bytes(drawn)
    file = folder / "rollouts" / "step-000001.parquet"
    seen = {"media": [digest], "pictures": [{"name": digest, "start": 0, "length": 2, "grid": [1, 1, 2]}]}
    rows = [{**row, **seen, "prompt": f"[sha256:{digest}]{row['prompt']}"} for row in read_file(file).to_pylist()]
    save(file, rows)
    open_index(folder)
    return folder


HOSTILE = {
    "script": "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>",
    "attributes": "\"><svg onload=window.pwned=3><a href='javascript:window.pwned=4'>click</a>",
    "controls": "\x00\x01\x07\x1b[2J\x7f\x9b bell and escape",
    "turned": "safe \u202eexe.fdp\u202c \u2066isolated\u2069 \u200b\ufeff hidden",
    "template": "${window.pwned=5} {{7*7}} <%= 1 %> </script></style></body>",
    "sql": "'; drop table rollouts; select '",
    "long": "x" * 10_000_000,
    "lines": "\n" * 5000,
    "letters": "e\u0301\u0301" * 400 + "\ud83d\ude00" * 10 + "\ufdfd" * 20,
}


def make_hostile(folder: Path) -> Path:
    """A run whose replies, names and reasons are what nobody should trust."""
    rows = []
    for index, (name, said) in enumerate(HOSTILE.items()):
        said = said.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        tokens = np.arange(60, dtype=np.int32)
        rows.append(
            {
                "step": 1,
                "index": index,
                "kind": "rl",
                "group": f"{said[:40]}#0",
                "member": 0,
                "epoch": 0,
                "task": said[:60],
                "columns": json.dumps({name: said[:500]}),
                "prompt": said[:2000],
                "text": said,
                "reward": float(index),
                "parts": [{"name": "<b>bold</b>", "value": 1.0}],
                "advantage": 1.0,
                "used": float(index),
                "fate": "filtered",
                "why": said[:300],
                "flags": ["<i>flag</i>"],
                "replayed": False,
                "stop": "eos",
                "truncated": False,
                "version": 0,
                "versions": [0],
                "sampled": 50,
                "scored": 50,
                "length": 50,
                "total": 60,
                "notes": json.dumps({"<u>note</u>": said[:200]}),
                "media": [],
                "pictures": [],
                "turns": [
                    {
                        "role": "prompt",
                        "text": said[:100],
                        "transcript": 0,
                        "first": 0,
                        "length": 10,
                        "reward": 0.0,
                        "cut": 0,
                        "calls": [],
                    },
                    {
                        "role": "sampled",
                        "text": said,
                        "transcript": 0,
                        "first": 10,
                        "length": 40,
                        "reward": 0.0,
                        "cut": 0,
                        "calls": [
                            {
                                "tool": said[:80],
                                "arguments": json.dumps({"a": said[:80]}),
                                "end": 1,
                                "problem": said[:80],
                            }
                        ],
                    },
                    {
                        "role": "tool",
                        "text": said,
                        "transcript": 0,
                        "first": 50,
                        "length": 0,
                        "reward": 0.0,
                        "cut": 3,
                        "calls": [],
                    },
                    {
                        "role": "sampled",
                        "text": said[:30],
                        "transcript": 0,
                        "first": 50,
                        "length": 10,
                        "reward": 0.0,
                        "cut": 0,
                        "calls": [],
                    },
                ],
                "tokens": tokens,
                "transcripts": [60],
                "engine": np.full(50, -0.5, dtype=np.float32),
                "spans": [
                    {"kind": "prompt", "start": 0, "length": 10, "version": None, "learned": False},
                    {"kind": "sampled", "start": 10, "length": 50, "version": 0, "learned": True},
                ],
            }
        )
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "rollouts" / "step-000001.parquet", rows)
    write_files(folder, [{"step": 1, "reward": 1.0}], 0, 1, True)
    bad = {"step": 1, "name": "<b>signal</b>", "message": HOSTILE["script"] + "\n" + HOSTILE["turned"]}
    (folder / "health.jsonl").write_text(json.dumps(bad) + "\n")
    return folder


def spoiled(folder: Path, copy: Path, steps: tuple[int, ...]) -> Path:
    """A copy whose index is whole and whose files of these steps are torn: nothing but their texts is missing."""
    shutil.copytree(folder, copy)
    for step in steps:
        file = copy / "rollouts" / f"step-{step:06d}.parquet"
        data = bytearray(file.read_bytes())
        data[8:-200] = bytes(len(data) - 208)
        file.write_bytes(bytes(data))
    return copy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    for name, default in (("steps", 560), ("groups", 128), ("group", 8), ("tokens", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    make_run(options.folder, options.steps, options.groups, options.group, options.tokens, evals=20)
