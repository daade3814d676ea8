"""A small decoder from scratch learns to answer real questions with a search engine. One command, which also resumes:

    python recipes/search_qa.py [--out runs/search-qa] [--seed 0] [--size small]

The questions are those of SQuAD and PopQA over the real passages of ../shared/data/retrieval. Whole articles of SQuAD and a
fifth of PopQA's questions are held out. The stages, each in a folder of its own under --out:

    index             BM25 over all passages (posttrain retriever build)
    reading           pre-training on made-up questions: a sentence of a passage with a name or a number left out, the
                      passages that a search for it finds, and the missing text. All of it is trained on, so that an
                      untrained model learns to copy from its context; and passages alone
    search-imitation  sft on questions of the training share, run in the environment search-qa: one search for the
                      question, then the answer, where a shown passage contains it
    search            GRPO in the same environment; the reward is the exact match alone
    direct-imitation, direct
                      the same without a search engine
    results.json, results.md
                      exact match on held-out questions, greedy, before and after GRPO, with intervals over questions, and
                      whole episodes

Finished stages are not repeated, and an interrupted one resumes from its newest checkpoint. Settings other than those of
--out need another --out.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import posttrain
from posttrain import Ask, Reply, Rollout, Turn, UserError
from posttrain.core.intervals import told
from posttrain.core.seeds import seed_of
from posttrain.core.transcripts import SpanKind
from posttrain.core.types import StopReason, Task
from posttrain.envs.builtin.search_qa import row_to_task, search_qa
from posttrain.runs.checkpoint import resolve
from posttrain.services.retrieval.passage_index import PassageIndex, build, open_index

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "retrieval"
HELD_OUT = 0.2
SEARCHES = 2
LOOKUPS = 6  # questions on one passage, where reading is taught
DIRECT = {"searches": 0}
SPAN = re.compile(r"(?<=[a-z,] )(?:[A-Z][\w'’.-]*\w(?: (?:of |the |de )?[A-Z][\w'’.-]*\w)*|\d[\d,.]*\d|\d)(?=[ ,.;:)])")
SENTENCE = re.compile(r"(?<=[.!?]) +(?=[A-Z\"“])")
LONGEST = 160  # characters of a made-up question

Row = dict[str, Any]
Episode = Callable[[Task, Sequence[str]], list[Row]]


@dataclass(frozen=True)
class Size:
    """Of the model and of each part of its training."""

    hidden: int = 256
    layers: int = 6
    heads: int = 8
    vocab: int = 8192
    context: int = 1280
    reading: int = 6000  # updates
    imitation: float = 3.0  # passes
    rows: int = 16  # of an update
    steps: int = 150  # of GRPO
    prompts: int = 16
    group: int = 8
    unseen: int = 1000  # held-out questions that are asked at the end
    save_every: int = 250  # updates of imitation; GRPO's steps a tenth of that
    limit: int | None = None  # passages; None: all
    topk: int = 3  # passages of a search
    shown: int = 500  # characters of each that are shown

    @property
    def searching(self) -> dict[str, Any]:
        """Options of the environment."""
        return {"topk": self.topk, "shown": self.shown, "searches": SEARCHES}


SIZES = {
    "try": Size(hidden=32, layers=2, heads=2, vocab=1024, reading=20, imitation=0.02, rows=4, steps=2, prompts=2, group=2,
                unseen=8, save_every=5, limit=400),
    "hour": Size(layers=4, context=512, reading=800, imitation=0.5, rows=8, steps=30, prompts=8, unseen=400, topk=1,
                 shown=400),
    "small": Size(),
    "large": Size(hidden=512, layers=8, heads=8, vocab=16_384, reading=20_000, rows=32, steps=300, prompts=32),
}  # fmt: skip
"""By name: some seconds, to see that all of it runs; 5.3 M parameters and an hour of one core; 6.9 M; 33 M, for a GPU."""


# -- questions ---------------------------------------------------------------------------------------------------------


def read(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def questions(data: Path, limit: int | None) -> tuple[list[Row], list[Row]]:
    """Rows to learn from, and those that are held out: no passage has questions on both sides."""
    titles = {row["id"]: row["title"] for row in read(data / "passages.jsonl")[:limit]}
    train: list[Row] = []
    held_out: list[Row] = []
    for row in read(data / "questions.jsonl"):
        if row["dataset"] in ("squad", "popqa") and row["gold_ids"] and row["gold_ids"][0] in titles:
            side = held_out if is_held_out(row["dataset"], titles[row["gold_ids"][0]]) else train
            side.append({name: row[name] for name in ("id", "dataset", "question", "answers", "gold_ids")})
    return train, held_out


def is_held_out(dataset: str, title: str) -> bool:
    """Whether the questions on this title are held out: it depends on nothing else."""
    return int(sha256(f"{dataset} {title}".encode()).hexdigest()[:8], 16) < HELD_OUT * 2**32


def made_up(contents: str, draw: random.Random) -> tuple[str, str] | None:
    """A question on a passage and its answer; None where no sentence has a name or a number in its middle."""
    text = " ".join(contents.partition("\n")[2].split())
    sentences = [sentence for sentence in SENTENCE.split(text) if len(sentence) > 40]
    draw.shuffle(sentences)
    for sentence in sentences:
        if spans := list(SPAN.finditer(sentence)):
            span = draw.choice(spans)
            before, behind = sentence[: span.start()], sentence[span.end() :].rstrip(" .!;:,")
            if len(before) > LONGEST // 2:
                before = before[-LONGEST // 2 :].partition(" ")[2]
            if len(before) + len(behind) > LONGEST:
                behind = behind[: LONGEST - len(before)].rpartition(" ")[0]
            return f"{before}what{behind}?", span[0]
    return None


# -- episodes ----------------------------------------------------------------------------------------------------------


def dialogue(index: PassageIndex, options: dict[str, Any]) -> Episode:
    """Run replies in the environment. Returns a row for each: the context and the reply."""

    def episode(task: Task, replies: Sequence[str]) -> list[Row]:
        rows, before, said = [], "", iter(replies)
        playing = search_qa(task, **options)
        event = next(playing)
        while (reply := next(said, None)) is not None:
            assert isinstance(event, Turn) and event.text is not None
            before += event.text
            rows.append({"prompt": before, "response": reply})
            before += reply
            try:
                event = playing.send(Reply(reply, StopReason.STOP))
                while isinstance(event, Ask):
                    event = playing.send(found(index, event.content["query"], event.content["k"]))
            except StopIteration:
                break
        return rows

    return episode


def found(index: PassageIndex, query: str, k: int) -> list[dict[str, Any]]:
    """The answer of the service "retriever"."""
    [hits] = index.search([query], k)
    return [{"id": hit.passage.id, "contents": hit.passage.contents, "score": hit.score} for hit in hits]


def searching(
    index: PassageIndex, question: str, answers: Sequence[str], gold: Sequence[str], size: Size
) -> list[str] | None:
    """One search for the question and the answer, where one of the gold passages that it finds shows one; else None."""
    for number, passage in enumerate(found(index, question, size.topk), 1):
        title, _, text = passage["contents"].partition("\n")
        shown = f"{title} {text[: size.shown]}"
        if answer := next((a for a in answers if a in shown and passage["id"] in gold), None):
            return [
                f"<think> I have to look this up. </think>\n<search> {question} </search>",
                f"<think> Doc {number} tells it. </think>\n<answer> {answer} </answer>",
            ]
    return None


def remembering(answers: Sequence[str]) -> list[str]:
    return [f"<think> I remember it. </think>\n<answer> {answers[0]} </answer>"]


def reading_rows(index: PassageIndex, seed: int, size: Size) -> Iterator[Row]:
    """Passages with some made-up questions on each, and episodes on one, with a search engine and without; without end.

    The first give many lessons in copying for the price of one passage.
    """
    with_search, without = dialogue(index, size.searching), dialogue(index, DIRECT)
    draw = random.Random(seed_of(seed, "reading"))
    while True:
        passage = index.passages[draw.randrange(len(index))]
        title, _, text = passage.contents.partition("\n")
        text = text[: 2 * size.shown]
        asked = [drawn for _ in range(LOOKUPS) if (drawn := made_up(f"{title}\n{text}", draw))]
        lookups = "".join(f"\n{question}\n<answer> {answer} </answer>" for question, answer in asked)
        yield {"prompt": f"{title}\n", "response": text + lookups}
        if (drawn := made_up(passage.contents, draw)) is None:
            continue
        task = row_to_task({"question": drawn[0], "answers": [drawn[1]]})
        assert task is not None
        if replies := searching(index, task["question"], task["answers"], [passage.id], size):
            *_, last = with_search(task, replies)
            yield last
        yield from without(task, remembering(task["answers"]))


def imitation_rows(index: PassageIndex, train: Sequence[Row], searches: bool, size: Size) -> list[Row]:
    """Questions of the training share with the replies to imitate; without those that the search does not answer."""
    rows = []
    for row in train:
        task = row_to_task(row)
        assert task is not None
        replies = (
            searching(index, task["question"], task["answers"], row["gold_ids"], size)
            if searches
            else remembering(task["answers"])
        )
        rows += [{**row, "replies": replies}] if replies else []
    return rows


# -- training ----------------------------------------------------------------------------------------------------------


class Stages:
    """The finished stages under these settings, in a file; a started one resumes."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        """Raises UserError if something was done there under other settings."""
        self.out, self._file = out, out / "stages.json"
        known = json.loads(self._file.read_text()) if self._file.exists() else {"settings": settings, "done": {}}
        if known["settings"] != settings:
            raise UserError(f"{out} has other settings: choose another --out, or delete it")
        self._known = known
        out.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, work: Callable[[str, dict[str, Any]], Any]) -> str:
        """The folder of a stage. `work` gets it, and the options that resume a run."""
        place = self.out / name
        if name not in self._known["done"]:
            print(f"-- {name}", flush=True)
            begun = any((place / "checkpoints").glob("step-*"))
            began = time.perf_counter()
            work(str(place), {"resume": True} if begun else {"overwrite": True})
            self._known["done"][name] = round(time.perf_counter() - began, 1)
            draft = self._file.with_suffix(".draft")
            draft.write_text(json.dumps(self._known, indent=1) + "\n")
            draft.replace(self._file)
        return str(place)

    @property
    def seconds(self) -> dict[str, float]:
        """Of each stage; of one that went on, since it did."""
        return dict(self._known["done"])


def train(stages: Stages, size: Size, seed: int, data: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """All stages; returns the figures."""
    common: dict[str, Any] = {
        "seed": seed,
        "save_every": size.save_every,
        "betas": (0.9, 0.95),
        "weight_decay": 0.1,
        **machine,
    }
    place = stages.run("index", lambda out, _: build(data / "passages.jsonl", out, limit=size.limit, overwrite=True))
    index = open_index(place)
    learned, held_out = questions(data, size.limit)
    shape = {
        "hidden": size.hidden,
        "layers": size.layers,
        "heads": size.heads,
        "vocab": size.vocab,
        "context": size.context,
    }
    read = stages.run("reading", lambda out, how: posttrain.sft(
        lambda: reading_rows(index, seed, size), out=out, **shape, **how, **common, steps=size.reading, rows=size.rows,
        mask="all", lr=2e-3 if size.hidden < 512 else 6e-4, warmup=min(200, size.reading // 10),
    ))  # fmt: skip
    trained: dict[str, tuple[str, str, dict[str, Any]]] = {}
    for name, options in (("search", size.searching), ("direct", DIRECT)):
        asked: dict[str, Any] = {"env": named(options)} | ({"retriever": (place,)} if options is not DIRECT else {})
        shown = imitation_rows(index, learned, options is not DIRECT, size)
        start = stages.run(f"{name}-imitation", lambda out, how, shown=shown, asked=asked: posttrain.sft(  # type: ignore[misc]
            shown, model=read, out=out, **asked, **how, **common, epochs=size.imitation, rows=size.rows, lr=3e-4, warmup=20,
        ))  # fmt: skip
        less = {**common, "save_every": -(-size.save_every // 10), "weight_decay": 0.0}
        folder = stages.run(name, lambda out, how, start=start, asked=asked, less=less: posttrain.rl(  # type: ignore[misc]
            learned, model=start, out=out, **asked, **how, **less, steps=size.steps, prompts=size.prompts, group=size.group,
            max_tokens=64, lr=3e-5, warmup=5, settings={"kl": 0.0},
        ))  # fmt: skip
        trained[name] = start, folder, asked
    return measured(trained, sample(held_out, size.unseen), seed, machine)


def named(options: dict[str, Any]) -> str:
    return ",".join(["search-qa", *(f"{name}={value}" for name, value in options.items())])


def sample(rows: Sequence[Row], count: int) -> list[Row]:
    """The same ones, whatever the seed."""
    return sorted(rows, key=lambda row: sha256(row["id"].encode()).hexdigest())[:count]


# -- results -----------------------------------------------------------------------------------------------------------


def measured(
    trained: dict[str, tuple[str, str, dict[str, Any]]], unseen: list[Row], seed: int, machine: dict[str, Any]
) -> dict[str, Any]:
    """Exact match on held-out questions, before and after GRPO."""
    how = {name: value for name, value in machine.items() if name != "quiet"}
    figures: dict[str, Any] = {}
    episodes: dict[str, list[str]] = {}
    for name, (start, folder, asked) in trained.items():
        for when, model in (("imitation", start), ("grpo", folder)):
            found = posttrain.evaluate(
                unseen, asked["env"], str(resolve(model)), samples=1, k=(1,), temperature=0.0, max_tokens=64, seed=seed,
                retriever=asked.get("retriever", ()), **how,
            )  # fmt: skip
            of = {
                dataset: exact([r for r in found.rollouts if r.task["dataset"] == dataset])
                for dataset in ("squad", "popqa")
            }
            figures[f"{name} {when}"] = {"all": found.figures["accuracy"], **of, **means(found.rollouts)}
            episodes[f"{name} {when}"] = [conversation(r) for r in interesting(found.rollouts)]
    return {"questions": len(unseen), "figures": figures, "episodes": episodes}


def exact(rollouts: Sequence[Rollout]) -> dict[str, float]:
    values = [r.rewards["exact"] for r in rollouts if "exact" in r.rewards]
    return {"mean": sum(values) / max(1, len(values)), "n": len(values)}


def means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    names = ("form", "answered", "searches", "invalid actions", "found", "own information")
    return {name: sum(r.rewards.get(name, 0.0) for r in rollouts) / len(rollouts) for name in names}


def interesting(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """A right one and a wrong one, the first of each."""
    right = [r for r in rollouts if r.rewards.get("exact") == 1]
    wrong = [r for r in rollouts if r.rewards.get("exact") == 0]
    return right[:1] + wrong[:1]


def conversation(rollout: Rollout) -> str:
    """An episode as it is read."""
    lines = []
    for turn in rollout.turns:
        who = "policy" if turn.kind is SpanKind.SAMPLED else "environment"
        lines.append(f"[{who}] {turn.text.strip()}")
    answers = " / ".join(rollout.task["answers"][:4])
    return "\n".join([*lines, f"[reward] {rollout.rewards.get('exact', 0):g}, gold: {answers}"])


def page(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    names = ["squad", "popqa", "searches", "found", "form", "answered"]
    lines = [
        f"Exact match on {result['questions']} held-out questions, greedy (95% intervals over questions).",
        "",
        f"| policy | exact match | {' | '.join(names)} |",
        f"|---|---|{'---|' * len(names)}",
    ]
    for name, f in result["figures"].items():
        cells = [f"{f[n]['mean']:.3f}" if isinstance(f[n], dict) else f"{f[n]:.2f}" for n in names]
        lines.append(f"| {name} | {told(f['all'])} | {' | '.join(cells)} |")
    for name, shown in result["episodes"].items():
        lines += ["", f"## {name}", *(f"\n```text\n{episode}\n```" for episode in shown)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/search-qa"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--quiet", action="store_true")
    given = parser.parse_args()
    size = SIZES[given.size]
    machine = {"threads": given.threads, "device": given.device, "precision": given.precision, "quiet": given.quiet}
    stages = Stages(given.out, {"size": asdict(size), "seed": given.seed, "precision": given.precision})
    result = {**train(stages, size, given.seed, given.data, machine), "seconds": stages.seconds, "seed": given.seed}
    (given.out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    (given.out / "results.md").write_text(page(result))
    print(page(result))


if __name__ == "__main__":
    main()
