"""How much is measured: the whole of it, or a little of each part to see that it runs.

Decided here: with which models. SmolLM2-135M, a real one, stands where it is at hand (`make real-model`), a random model of
27 M parameters where it is not. Rows in bfloat16 are left out on processors without such products: they would take
some ten times as long, on every side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from work import FIXED, MAX_TOKENS, VOCABULARIES


@dataclass(frozen=True)
class Rival:
    """A model, and the arithmetic in which both sides run it: "float32", or "bfloat16" products over float32 weights."""

    model: str
    precision: str = "float32"

    @property
    def name(self) -> str:
        return self.model if self.precision == "float32" else f"{self.model} {self.precision}"


@dataclass(frozen=True)
class Lesson:
    """Who learns from whom, by which divergence, and how many tokens a reply has: at most, or always where it never ends."""

    student: str
    max_tokens: int
    divergence: str = "reverse-kl"
    teacher: str = "27m"

    @property
    def name(self) -> str:
        ends = "natural lengths" if self.student in MAX_TOKENS else f"{self.max_tokens} tokens each"
        return f"{self.divergence}, {ends}"


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    models: tuple[str, ...]  # where posttrain is alone, in float32
    rivals: tuple[Rival, ...]  # where it stands beside others
    rounds: dict[str, dict[str, int]]  # part -> model -> rounds
    ways: dict[str, tuple[str, ...]]  # model -> settings of TRL, the fastest of which counts: see `trl_side.choose`
    memory_way: str  # the setting of TRL whose memory is measured
    vocabularies: tuple[int, ...]
    contexts: tuple[int, ...]
    starts: int
    starts_of_trl: int
    eager: bool  # vLLM without compiling: starts sooner, samples slower
    sft_steps: dict[str, int]  # model -> steps in a round
    pairs: dict[str, dict[str, tuple[Rival, ...]]]  # part -> kind of pairs -> models
    pair_ways: dict[str, tuple[int, ...]]  # model -> pairs that go through TRL's model at once; the fastest counts
    passes: dict[str, int]  # model -> passes over the pairs in a round
    lessons: tuple[Lesson, ...]
    backed: tuple[str, ...]  # models that transformers computes
    backed_rounds: int
    lesson_ways: tuple[int, ...]  # replies that go through TRL's models at once; the fastest counts
    rewards: tuple[str, ...] = ("signal", "sparse")  # of GRPO's steps, see `rewards.py`
    slow_rewards: tuple[str, ...] = ("signal",)  # the same of models whose steps take minutes: SmolLM2

    def of_models(self, names: Sequence[str]) -> Plan:
        """The rows of these models alone."""
        return replace(
            self,
            models=tuple(name for name in self.models if name in names),
            rivals=tuple(rival for rival in self.rivals if rival.model in names),
            pairs={
                part: {kind: tuple(rival for rival in rivals if rival.model in names) for kind, rivals in kinds.items()}
                for part, kinds in self.pairs.items()
            },
            backed=tuple(name for name in (*self.backed, *ON_REQUEST) if name in names),
            lessons=tuple(lesson for lesson in self.lessons if lesson.student in names),
        )


ON_REQUEST = ("gemma",)
"""Models of `backed` that --models alone selects: a step of a vocabulary of 262,144 takes over ten minutes a side."""
WHOLE = Plan(
    models=("5m", "27m"),
    rivals=(Rival("5m"), Rival("27m"), Rival("27m", "bfloat16")),
    rounds={
        "sampling": {"5m": 3, "27m": 2, "smollm2": 1},
        "grpo": {"5m": 3, "27m": 2, "smollm2": 3},
        "sft": {"5m": 3, "27m": 2, "smollm2": 3},
        "peak": {"5m": 3, "27m": 2, "smollm2": 1},
        "growth": {"long": 2},
        "pairs": {"5m": 3, "27m": 2, "smollm2": 3},
        "distill": {"5m": 3, "long": 3},
    },
    ways={"5m": ("16", "8"), "27m": ("16", "8"), "smollm2": ("16",)},
    memory_way="8",
    vocabularies=VOCABULARIES,
    contexts=(512, 1024, 2048, 4096),
    starts=3,
    starts_of_trl=2,
    eager=False,
    sft_steps={"5m": 4, "27m": 2, "smollm2": 1},
    pairs={
        "dpo": {"gsm8k": (Rival("5m"), Rival("27m")), "short": (Rival("5m"),)},
        "reward": {"gsm8k": (Rival("5m"),), "short": (Rival("5m"),)},
    },
    pair_ways={"5m": (8, 4, 2), "27m": (4, 2), "smollm2": (8, 4)},
    passes={"5m": 1, "27m": 1, "smollm2": 1},
    lessons=(
        Lesson("5m", MAX_TOKENS["5m"]),
        Lesson("long", FIXED, divergence="jsd"),
    ),
    backed=("smollm",),
    backed_rounds=2,
    lesson_ways=(16, 8, 4),
)


def planned(quick: bool, real: bool, bfloat16: bool) -> Plan:
    """`real`: SmolLM2 is at hand; `bfloat16`: the processor has products in it."""
    if quick:
        return QUICK
    rivals = [r for r in WHOLE.rivals if bfloat16 or r.precision == "float32"]
    if not real:
        return replace(WHOLE, rivals=tuple(rivals))
    names = {"27m": "smollm2"}
    rivals = [replace(r, model=names.get(r.model, r.model)) for r in rivals]
    short = {"dpo": (Rival("5m"), Rival("smollm2")), "reward": (Rival("5m"), Rival("smollm2"))}
    return replace(
        WHOLE,
        models=("5m", "smollm2"),
        rivals=tuple(rivals),
        pairs={part: {"gsm8k": (Rival("5m"),), "short": short[part]} for part in WHOLE.pairs},
        backed=("smollm2",),
    )


QUICK = Plan(
    models=("5m",),
    rivals=(Rival("5m"), Rival("5m", "bfloat16")),
    rounds={part: {"5m": 1, "long": 1} for part in WHOLE.rounds},
    ways={"5m": ("8",)},
    memory_way="8",
    vocabularies=(4096, 32768),
    contexts=(256, 512),
    starts=1,
    starts_of_trl=1,
    eager=True,
    sft_steps={"5m": 1},
    pairs={part: {"gsm8k": (Rival("5m"),), "short": (Rival("5m"),)} for part in WHOLE.pairs},
    pair_ways={"5m": (8, 4)},
    passes={"5m": 1},
    lessons=(Lesson("5m", 16), Lesson("long", 8, divergence="jsd")),
    backed=("smollm",),
    backed_rounds=1,
    lesson_ways=(16, 8),
)
