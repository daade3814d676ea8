"""A real model learns to answer questions with a search engine, as in Search-R1. One command, which also resumes:

    python -m recipes.real.search

The questions are those of SQuAD and PopQA over the 22,187 passages of ../shared/data/retrieval; whole articles of SQuAD and
a fifth of PopQA's questions are held out. For every seed:

    SFT           imitates scripted episodes: a search for the question, then the answer that the passage shows
    GRPO          the model searches; the reward is the exact match of its answer alone (Search-R1, arXiv 2503.09516)
    GRPO, longer  the same with four times the steps
    GRPO, information trained
                  the same, but the loss also falls on the text of the environment after the prompt, so on <information>,
                  with the advantage of its episode: the paper's arm without a mask (section 5.4)
    GRPO, F1      the reward is F1 of the answer's words (arXiv 2505.04588), on questions whose first passage contains an
                  answer, so that fewer groups are wrong throughout
    without ...   SFT and GRPO without a search engine

`--arms SFT GRPO "GRPO, information trained"` runs these arms only; arms that are finished are not repeated.
`--demonstrations 80` imitates fewer episodes.

Where are the questions lost that GRPO does not answer? Its policy also answers with a search that is scripted, for the
words of the question, and with the gold passage. Policies are measured on the same held-out questions, greedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any
from unittest import mock

import posttrain
from experiments.retrieved_token_masking import Unmasked
from posttrain import Rollout
from posttrain.core.transcripts import SpanKind
from posttrain.envs.builtin.search_qa import SEARCH, row_to_task
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.services.retrieval.passage_index import PassageIndex, build, open_index
from posttrain.training import playground
from posttrain.verify.short_answer import contains_answer
from recipes import search_qa
from recipes.real.study import Figures, Study, conversation, finished, options, right_and_wrong, run, shuffled

Row = dict[str, Any]

SHOWN = 800  # characters of a passage
SIZE = search_qa.Size(topk=1, shown=SHOWN)
LONGEST = 48  # tokens of a reply
SFT_LR, GRPO_LR, F1_LR = 5e-5, 1e-5, 2e-5
WITHOUT, SCRIPTED, GOLD = "without search, ", "GRPO, scripted search", "GRPO, gold passage"
LONGER = "GRPO, longer"
UNMASKED = "GRPO, information trained"
F1 = "GRPO, F1"
ARMS = ("start", "SFT", "GRPO", LONGER, UNMASKED, F1, SCRIPTED, GOLD, f"{WITHOUT}SFT", f"{WITHOUT}GRPO")
COMPARED = (
    ("with search minus without", "GRPO", f"{WITHOUT}GRPO"),
    ("GRPO minus its SFT", "GRPO", "SFT"),
    ("GRPO, longer, minus its SFT", LONGER, "SFT"),
    ("GRPO, F1, minus its SFT", F1, "SFT"),
    ("masked minus unmasked (GRPO minus GRPO, information trained)", "GRPO", UNMASKED),
)
FIGURES = ("exact", "answered", "form", "searches", "found", "own information")


@dataclass
class Searching:
    """The arms of one seed: how each is trained, and how all are measured."""

    study: Study
    seed: int
    index: PassageIndex
    place: str  # folder of the index
    learned: list[Row]
    unseen: list[Row]
    demonstrations: int
    prompts: int
    steps: int

    def env(self, arm: str) -> dict[str, Any]:
        """The environment of an arm, with the search engine or without."""
        if arm.startswith(WITHOUT):
            return {"env": search_qa.named({"searches": 0, "chat": "true"})}
        shown = {"topk": 1, "shown": SHOWN, "searches": 1, "chat": "true"}
        return {"env": search_qa.named({**shown, "f1": 1} if arm == F1 else shown), "retriever": (self.place,)}

    def sft(self, arm: str) -> str:
        first = self.learned[: 4 * self.demonstrations]  # the search does not answer all of them
        rows = search_qa.imitation_rows(self.index, first, not arm.startswith(WITHOUT), SIZE)[: self.demonstrations]
        options = {"rows": 8, "epochs": 1, "lr": SFT_LR, "warmup": 3, "schedule": "linear", **self.env(arm)}
        return finished(posttrain.sft(rows, model=self.study.model, **options, **self.study.common(arm, self.seed)))

    def grpo(self, arm: str) -> str:
        start = str(self.study.folder(f"{WITHOUT}SFT" if arm.startswith(WITHOUT) else "SFT", self.seed))
        tasks = self.learned[4 * self.demonstrations :]
        options = {
            "algorithm": "grpo",
            "kl": 0.0,
            "group": 8,
            "max_tokens": LONGEST,
            "lr": GRPO_LR,
            "warmup": 3,
            **self.env(arm),
        }
        size = {"steps": self.steps * (4 if arm == LONGER else 1), "prompts": self.prompts}
        if arm == F1:
            tasks = list(islice(filter(self.can_be_found, tasks), 600))
            options |= {"lr": F1_LR, "schedule": "linear"}
            size["steps"] = self.steps * 3 // 2
        with information_trained() if arm == UNMASKED else nullcontext():
            return finished(posttrain.rl(tasks, model=start, **options, **size, **self.study.common(arm, self.seed)))

    def can_be_found(self, row: Row) -> bool:
        """Whether the first passage that a search for the question finds contains an answer."""
        task = row_to_task(row)
        assert task is not None
        shown = as_shown(search_qa.found(self.index, task["question"], 1)[0]["contents"])
        return contains_answer(shown, task["answers"], words=True) == 1.0

    def measured(self, arm: str, model: str) -> Figures:
        rollouts = self.study.evaluate(self.unseen, model=model, max_tokens=LONGEST, **self.env(arm)).rollouts
        mean = {name: sum(r.rewards.get(name, 0.0) for r in rollouts) / len(rollouts) for name in FIGURES}
        return {**mean, "queries": queries(rollouts), "episodes": [conversation(r) for r in right_and_wrong(rollouts)]}

    def with_given_passage(self, arm: str) -> Figures:
        """The policy of GRPO answers from what a scripted search found, or from the gold passage."""
        words = Tokenizer.load(self.study.model)
        rows = [scripted(row, self.index, arm == GOLD, words) for row in self.unseen]
        model = str(self.study.folder("GRPO", self.seed))
        how = {"max_tokens": LONGEST, "chat": False, "stop": ("</answer>",)}
        rollouts = self.study.evaluate(rows, "verify:exact_match,answer=tags", model, **how).rollouts
        exact = sum(r.reward or 0.0 for r in rollouts) / len(rollouts)
        return {"exact": exact, "found": sum(row["found"] for row in rows) / len(rows)}

    def run(self, arms: Sequence[str]) -> None:
        for arm in arms:
            self.study.once(arm, self.seed, lambda arm=arm: self.figures(arm))

    def figures(self, arm: str) -> Figures:
        if arm in (SCRIPTED, GOLD):
            return self.with_given_passage(arm)
        if arm == "start":
            return self.measured(arm, self.study.model)
        return self.measured(arm, self.sft(arm) if arm.endswith("SFT") else self.grpo(arm))


@contextmanager
def information_trained() -> Iterator[None]:
    """Context manager in which `posttrain.rl` also trains on the text of the environment after the prompt.

    posttrain has no such option: it never trains on text that the policy did not write. Here the player of its episodes is
    exchanged for one that marks this text as a demonstration, so that it is scored with the advantage of its episode.
    """
    with mock.patch.object(playground, "Player", Unmasked):
        yield


def main() -> None:
    parser = options(__doc__ or "", "search")
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=ARMS, metavar="ARM", help="arms to run (default: all)"
    )
    parser.add_argument("--demonstrations", type=int, default=320, metavar="N", help="episodes that SFT imitates")
    given = parser.parse_args()
    demonstrations, steps, prompts, asked = (8, 2, 2, 8) if given.small else (given.demonstrations, 16, 8, 150)
    settings = {
        "demonstrations": demonstrations,
        "steps": steps,
        "prompts": prompts,
        "questions": asked,
        "shown": SHOWN,
        "rates": [SFT_LR, GRPO_LR, F1_LR],
    }
    study = Study(given, settings)
    place = study.out / "index"
    if not place.exists():
        build(given.data / "retrieval" / "passages.jsonl", str(place))
    index = open_index(str(place))
    learned, held_out = search_qa.questions(given.data / "retrieval", None)
    unseen = search_qa.sample(held_out, asked)
    for seed in study.seeds:
        rows = shuffled(learned, seed, "search")
        Searching(study, seed, index, str(place), rows, unseen, demonstrations, prompts, steps).run(given.arms)
    study.finish(page(study, len(unseen), demonstrations, steps * prompts))


def scripted(row: Row, index: PassageIndex, is_gold: bool, words: Tokenizer) -> Row:
    """A row whose prompt ends behind <information>: what a search for the question finds, or the gold passage."""
    task = row_to_task(row)
    assert task is not None
    gold = next(passage for passage in index.passages if passage.id in row["gold_ids"]) if is_gold else None
    contents = gold.contents if gold else search_qa.found(index, task["question"], 1)[0]["contents"]
    prompt = words.render([{"role": "user", "content": SEARCH.format(question=task["question"])}])
    prompt += f"<think> I have to look this up. </think>\n<search> {task['question']} </search>"
    shown = as_shown(contents)
    is_found = contains_answer(shown, task["answers"], words=True) == 1.0
    return {
        "id": row["id"], "prompt": f"{prompt}\n\n<information>{shown}</information>\n\n", "answer": task["answers"],
        "found": is_found,
    }  # fmt: skip


def as_shown(contents: str) -> str:
    """A passage as the environment shows it."""
    title, _, text = contents.partition("\n")
    return f"Doc 1(Title: {title}) {text[:SHOWN]}"


def queries(rollouts: Sequence[Rollout]) -> list[list[str]]:
    """Some questions with the queries that the policy searched for."""
    found = []
    for rollout in rollouts:
        asked = [turn.text for turn in rollout.turns if turn.kind is SpanKind.SAMPLED and "<search>" in turn.text]
        if asked:
            query = asked[0].partition("<search>")[2].partition("</search>")[0].strip()
            found.append([rollout.task["question"], query])
    return found[:8]


def page(study: Study, count: int, shown: int, trained: int) -> list[str]:
    """The part of the page that the recipe writes."""
    columns = {"exact": "exact match", "found": "the passage contains the answer", "minutes": "minutes"}
    acts = {"searches": "searches", "answered": "answered", "form": "format kept"}
    acts["own information"] = "<information> that it wrote itself"
    arms, left_out = study.there(ARMS)
    played = [arm for arm in arms if arm not in (SCRIPTED, GOLD)]
    lines = [
        *study.head("search"),
        f"{count} held-out questions, greedy. Mean over seeds with its 95% interval (Student), then every seed. "
        f"SFT imitates {shown} episodes; GRPO then samples rollouts for {trained} questions, the longer arm for "
        f"{4 * trained}.",
        "",
        *left_out,
        *study.table(arms, columns),
        "",
        "Behaviour of the policies, as shares of episodes:",
        "",
        *study.table(played, acts),
        "",
        "Exact match, seed by seed:",
        "",
        *[
            f"- {words}: {study.gain(arm, over, 'exact')}"
            for words, arm, over in COMPARED
            if study.has(arm) and study.has(over)
        ],
    ]
    for arm in ("GRPO", LONGER, UNMASKED, F1):
        lines += examples(arm, study.figures(arm)[0]) if study.has(arm) else []
    return lines


def examples(arm: str, first: Figures) -> list[str]:
    """Queries and episodes of the first seed after an arm."""
    lines = ["", f"Queries of the first seed after {arm}:", "", "| question | query |", "|---|---|"]
    for asked in first["queries"]:
        lines.append("| " + " | ".join(" ".join(text.replace("|", "/").split()) for text in asked) + " |")
    lines += ["", f"The first right and the first wrong held-out episode of the first seed after {arm}:", ""]
    for episode in first["episodes"]:
        lines += episode
    return lines


if __name__ == "__main__":
    run(main)
