"""What the tables of rollouts take on the disk, and to write: 512 rollouts of 2,048 sampled tokens.

    python benchmarks/record/size.py [--text FILES ... | --replies FILE]

The text is drawn from a Markov chain over the tokens of a real one: by default of this repository's documents and code, in
a vocabulary of 16,384. It compresses about as well as the text itself, and less than replies of a group, which share
sentences. Log-probabilities are what float32 makes of a softmax: most tokens nearly certain, the others some nats.
`full` has what a row with a reference and one update a step computes: the learner, the reference, entropy, weight. With two
updates, those that the second learns from have the learner before both as well; with two passes, all have. JSON is the form
that runs left before.

With `--replies`, the rollouts of `posttrain eval --out`, replies of a model are joined end to end instead, tokens and
log-probabilities as they were sampled; what fewer tokens take is multiplied.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.core.rollouts import Outcome, PlayedTurn, Rollout
from posttrain.core.transcripts import SpanKind, Transcript
from posttrain.core.types import Completion, StopReason
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_file, rows_of
from posttrain.runs.record.rollout_tables import rollouts_table
from posttrain.runs.record.table_writer import write_table

ROLLOUTS, TOKENS, GROUP, PROMPT = 512, 2048, 8, 128
VOCABULARY = 16_384
LIMITS = {"tokens": 6.0, "full": 14.0}  # MB


def chain(texts: list[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """For each token, those that follow it in the text, as often as they do."""
    ids = np.array([token for text in texts for token in tokenizer.encode(text)])
    order = np.argsort(ids[:-1], kind="stable")
    ends = np.searchsorted(ids[:-1][order], np.arange(VOCABULARY + 1))
    follows = ids[1:][order]
    return [follows[ends[token] : ends[token + 1]] for token in range(VOCABULARY)]


def softmaxed(rng: np.random.Generator, count: int) -> np.ndarray:
    """Log-probabilities of sampled tokens as float32 has them: (x - max) - log sum exp (x - max), of logits about 20."""
    sure = rng.random(count) < 0.6
    nats = np.where(sure, 10.0 ** -rng.uniform(0.5, 5, count), rng.exponential(1.2, count))
    total = np.exp(np.where(nats < 0.69, nats, rng.uniform(0.1, 0.69, count))).astype(np.float32)  # sum of exponentials
    below = np.where(nats < 0.69, 0.0, nats - np.log(total))
    gap = np.float32(20) - (np.float32(20) - below.astype(np.float32))
    return np.asarray(-gap - np.log(total), dtype=np.float32)


def outcomes(texts: list[str], tokenizer: Tokenizer, rng: np.random.Generator) -> list[Outcome]:
    follows = chain(texts, tokenizer)
    some = np.unique(np.concatenate(follows))
    prompts = [rng.choice(some, PROMPT).tolist() for _ in range(ROLLOUTS // GROUP)]
    found = []
    for place in range(ROLLOUTS):
        prompt = prompts[place // GROUP]
        tokens, last = [], prompt[-1]
        for _ in range(TOKENS):
            own = follows[last] if len(follows[last]) else some
            last = int(rng.choice(own))
            tokens.append(last)
        engine = softmaxed(rng, TOKENS)
        found.append(outcome(place, prompt, tokenizer.decode(prompt), tokens, tokenizer.decode(tokens), engine, rng))
    return found


def outcome(
    place: int,
    prompt: list[int],
    shown: str,
    tokens: list[int],
    said: str,
    engine: np.ndarray,
    rng: np.random.Generator,
) -> Outcome:
    """A rollout with numbers of its tokens such as an update finds."""
    transcript = Transcript()
    transcript.observe(prompt)
    transcript.sample(Completion(place, tokens, engine.tolist(), said, StopReason.LENGTH, 3))
    turns = [
        PlayedTurn(SpanKind.PROMPT, shown, 0, 0, len(prompt)),
        PlayedTurn(SpanKind.SAMPLED, said, 0, len(prompt), len(tokens)),
    ]
    name = f"task-{place // GROUP}"
    rollout = Rollout({"id": name, "answer": "42"}, f"{name}#0", [transcript], float(rng.integers(2)), turns=turns,
                      text=said, prompt=shown)  # fmt: skip
    advantage, count = float(rng.normal()), len(tokens)
    numbers = {
        "before": engine + rng.normal(0, 0.01, count),
        "learner": engine + rng.normal(0, 0.03, count),
        "reference": engine + rng.normal(0, 0.2, count),
        "entropy": rng.gamma(2, 0.3, count),
        "weight": np.where(rng.random(count) < 0.02, 0.0, advantage / count * rng.lognormal(0, 0.02, count)),
    }
    return Outcome(rollout, advantage, numbers={name: values.astype(np.float32) for name, values in numbers.items()})


def joined(file: Path, rng: np.random.Generator) -> list[Outcome]:
    """Replies of a model, as many as there are, in rollouts of TOKENS tokens."""
    table = read_file(file, ["text", "tokens", "spans", "engine", "prompt"])
    found, tokens, engine, text = list[Outcome](), list[int](), list[float](), ""
    for row in rows_of(table):
        sampled = [span for span in row["spans"] if span["kind"] == "sampled"]
        own = [token for span in sampled for token in row["tokens"][span["start"] : span["start"] + span["length"]]]
        tokens, engine, text = tokens + own, engine + row["engine"], text + row["text"]
        if len(tokens) >= TOKENS:
            prompt = list(row["tokens"][: row["spans"][0]["length"]])
            place, measured = len(found), np.array(engine, dtype=np.float32)
            found.append(outcome(place, prompt, row["prompt"], tokens, text, measured, rng))
            tokens, engine, text = [], [], ""
    return found


def lines(made: list[Outcome]) -> bytes:
    """The older form."""
    rows = []
    for o in made:
        (transcript,), turns = o.rollout.transcripts, o.rollout.turns
        told = [{"kind": str(t.kind), "text": t.text, "start": t.start, "length": t.length} for t in turns]
        logp = [float(str(np.float32(value))) for value in transcript.logp]
        plain = {**transcript.as_dict(), "logp": logp}
        rows.append({"prompt": o.rollout.prompt, "text": o.rollout.text, "turns": told, "transcripts": [plain]})
    return b"".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n" for row in rows)


def columns_of(path: Path) -> list[tuple[str, float]]:
    """(column, MB) of a file, the largest first."""
    from pyarrow import parquet

    sizes: dict[str, int] = {}
    metadata = parquet.ParquetFile(path).metadata
    for group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            own: Any = metadata.row_group(group).column(column)
            name = own.path_in_schema.partition(".")[0]
            sizes[name] = sizes.get(name, 0) + own.total_compressed_size
    return sorted(((name, size / 1e6) for name, size in sizes.items()), key=lambda pair: -pair[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", nargs="*", type=Path, help="files whose text the replies are drawn from")
    parser.add_argument("--replies", type=Path, help="rollouts of an evaluation, whose replies are joined")
    asked = parser.parse_args()
    rng = np.random.default_rng(0)
    if asked.replies:
        made = joined(asked.replies, rng)
    else:
        root = Path(__file__).parents[2]
        files = asked.text or [*sorted(root.glob("docs/**/*.md")), *sorted(root.glob("posttrain/**/*.py"))]
        texts = [file.read_text(encoding="utf-8")[:400_000] for file in files]
        made = outcomes(texts, Tokenizer.train(texts, VOCABULARY), rng)
    sampled = sum(o.rollout.n_sampled for o in made)
    characters, times = sum(len(o.rollout.text) for o in made), ROLLOUTS * TOKENS / sampled
    print(f"{len(made)} rollouts, {sampled:,} tokens of {characters / sampled:.2f} characters; sizes times {times:.3g}")
    print(f"json              {len(lines(made)) * times / 1e6:6.2f} MB")
    plain = [Outcome(o.rollout, o.advantage) for o in made]
    with tempfile.TemporaryDirectory() as folder:
        once = [Outcome(o.rollout, o.advantage, numbers={**o.numbers, "before": None}) for o in made]  # type: ignore[dict-item]
        half = [pair[place % 2] for place, pair in enumerate(zip(once, made, strict=True))]
        for name, own in (("tokens", plain), ("full", once), ("full, two updates", half), ("full, two passes", made)):
            path = Path(folder) / f"{name}.parquet"
            began = time.perf_counter()
            table = rollouts_table(1, own, "rl")
            built = time.perf_counter()
            write_table(path, table)
            seconds = time.perf_counter() - built
            held = sum(mb for _, mb in columns_of(path))
            size = held * times + path.stat().st_size / 1e6 - held
            limit = LIMITS[name.partition(",")[0]]
            within = "within" if size <= limit else "beyond"
            print(
                f"{name:18}{size:6.2f} MB, {within} {limit:g}; {built - began:.2f} s to make, {seconds:.2f} s to write"
            )
            print(" " * 18 + ", ".join(f"{column} {mb * times:.2f}" for column, mb in columns_of(path)[:9]))


if __name__ == "__main__":
    main()
