"""A row for a reader: in plain mathematics, as data, and as a page of the documentation. All from the row itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import singledispatch
from typing import Any

from posttrain.algorithms.branching import PAPER
from posttrain.algorithms.policy import Algorithm
from posttrain.algorithms.preference import Imitated, Margin, Preference
from posttrain.algorithms.responses import LogRatio, PolicyWeight, ResponseLikelihood
from posttrain.algorithms.reward_model_table import Scoring
from posttrain.algorithms.row import Row
from posttrain.algorithms.settings import change, flags, settings_of
from posttrain.core.component import Component, Need

SYMBOLS = (
    "Symbols: lp, old, ref, mu: log-probability of a sampled token under the policy, the policy before the step's updates, "
    "the reference, the engine. B: number of rollouts; n_i: trained tokens of rollout i; R_i: its reward; m_i: all its "
    "sampled tokens; budget: the maximum of m_i. sg(): stop-gradient. A is 0 behind the last token."
)
OF_TEACHERS = "p, q: the policy's and the teacher's probabilities over the vocabulary; tea: log q of a sampled token."
SYMBOLS_OF_PREFERENCES = (
    "Symbols: lp, ref: log-probability of a token of a response under the policy and the reference; n: tokens of the "
    "response. s: score of a response; s_w, s_l: of the better and of the worse one of a comparison; margin: 0 where no "
    "component sets one. w: weight of a comparison c or of a label v; all weights add up to 1 over the optimizer batch. "
    "sigma(x) = 1 / (1 + exp(-x))."
)


@singledispatch
def parts(row: Row) -> list[tuple[str, str, str]]:
    """(what, formula, source) of every part the row has, the same names for all rows of a table."""
    raise NotImplementedError


@parts.register
def _(row: Algorithm) -> list[tuple[str, str, str]]:
    ratio = " then ".join(step.formula for step in row.ratio) or "exp(lp - old)"
    steps = "; ".join(step.source for step in row.ratio) or "PPO, arXiv 1707.06347, section 3"
    found = [("advantage A", row.advantage.formula, row.advantage.source)]
    if row.teacher is not None:
        what = "added to A, token by token" if row.teacher.sampled else "divergence D from the teacher"
        found.append((what, row.teacher.formula, row.teacher.source))
    if row.reinforces:
        found.append(("maximised per token", row.surrogate.formula, row.surrogate.source))
    if row.reinforces and row.surrogate.uses_ratio:
        found.append(("ratio r", ratio, steps))
        if row.old == "sampler":
            found.append(("old", "the policy that sampled", "PPO, arXiv 1707.06347, section 3"))
    found.append(("weight w of a token", row.aggregate.formula, row.aggregate.source))
    if row.kl is not None:
        before = "the policy that sampled" if row.old == "sampler" else "the policy before the update"
        whom = "the reference" if row.kl.against == "reference" else before
        found.append((f"KL to {whom}, in the {row.kl.where}", f"{row.kl.beta:g} x {row.kl.formula}", row.kl.source))
        if row.kl.control is not None:
            found.append(("control of beta", row.kl.control.formula, row.kl.control.source))
    named = (
        ("entropy bonus coefficient", row.entropy),
        ("selected tokens", row.select),
        ("correction for the engine", row.correction),
        ("critic loss", row.critic),
        ("rollouts of a group", row.branching),
        ("groups", row.sampling),
        *(("rollouts", chosen) for chosen in row.filters),
        *(("reward shaping", shape) for shape in row.shaping),
        ("imitation loss", row.imitation),
        ("pretraining loss", row.pretraining),
        ("step", row.trust_region),
        ("replay", row.replay),
    )
    found += [(what, part.formula, part.source) for what, part in named if part is not None]
    if row.branching is not None:
        found.append(("A of shared tokens", row.branching.sharing, f"{PAPER}, section 3.2"))
    if row.refresh:
        refresh = f"becomes the policy every {row.refresh} steps"
        found.append(("reference", refresh, "DeepSeekMath, arXiv 2402.03300, algorithm 1"))
    epochs = f", in {row.epochs} epochs of {row.minibatches}" if row.epochs > 1 else ""
    return [*found, ("updates per step", f"{row.epochs * row.minibatches}{epochs}{_of_ratio(row)}", row.stated)]


def _of_ratio(row: Algorithm) -> str:
    """What one update per step makes of the ratio."""
    if not (row.on_policy and row.surrogate.uses_ratio and row.old == "start"):
        return ""
    return " (so r is exactly 1" + (" and nothing is clipped)" if row.surrogate.clips else ")")


@parts.register
def _(row: Preference) -> list[tuple[str, str, str]]:
    found = [
        ("loss", row.link.formula, row.link.source),
        ("score s of a response", row.score.formula, row.score.source),
        ("weight w", row.denominator.formula, row.denominator.source),
    ]
    named = (("margin", row.margin), ("further weight", row.weight), ("imitation loss", row.imitation))
    return found + [(what, part.formula, part.source) for what, part in named if part is not None]


@parts.register
def _(row: Scoring) -> list[tuple[str, str, str]]:
    found = [
        ("loss", row.link.formula, row.link.source),
        ("weight w of a comparison", row.denominator.formula, row.denominator.source),
    ]
    named = (("margin", row.margin), ("penalty", row.penalty))
    return found + [(what, part.formula, part.source) for what, part in named if part is not None]


@singledispatch
def objective(row: Row) -> str:
    """What is optimised, in one line."""
    raise NotImplementedError


@objective.register
def _(row: Preference) -> str:
    of = f"{row.coefficient:g} x " if row.coefficient != 1 else ""
    inside = "sum_v w_v loss(s)" if row.link.reads_labels else "sum_c w_c loss(s_w, s_l)"
    return f"minimise  {of}{inside}" + (" + imitation" if row.imitation else "")


@objective.register
def _(row: Scoring) -> str:
    if row.link.reads_labels:
        return "minimise  sum_v w_v loss(s, y)"
    return "minimise  sum_c w_c loss(s_w, s_l)" + (" + penalty" if row.penalty else "")


@objective.register
def _(row: Algorithm) -> str:
    inside = row.surrogate.formula if row.reinforces else ""
    if row.correction is not None and row.reinforces:
        inside = f"c {inside}"
    if row.kl is not None and row.kl.where == "loss":
        inside += f" - {row.kl.beta:g} k"
    if row.entropy is not None:
        inside += " + alpha H"
    if row.teacher is not None and not row.teacher.sampled:
        inside += f" - {row.teacher.coefficient:g} D"
    inside = inside.removeprefix(" + ").strip()
    outside = [part for part, there in (("critic's loss", row.critic), ("imitation", row.imitation)) if there]
    outside += ["pretraining"] if row.pretraining else []
    return f"maximise  sum_i sum_t w_i [ {inside} ]" + "".join(f" - {part}" for part in outside)


def describe(row: Row) -> list[str]:
    """The row in plain mathematics, a line each."""
    lines = [f"{row.name}: {row.paper}", f"  {objective(row)}"]
    if isinstance(row, Algorithm) and row.kl is not None and row.kl.where == "reward":
        lines.append(f"  R_i = reward_i - {row.kl.beta:g} sum_t k, each token's share subtracted from its own reward")
    for what, formula, source in parts(row):
        lines.append(f"  {what}: {formula}" + (f"   [{source}]" if source else ""))
    return lines


def differences(row: Row, other: Row) -> list[str]:
    """How the row differs from the other, a line each; [] if it does not."""
    own, theirs = ({what: formula for what, formula, _ in parts(r)} for r in (row, other))
    found = []
    for what in [*own, *(w for w in theirs if w not in own)]:
        if own.get(what) != theirs.get(what):
            found.append(f"{what}: {own.get(what, 'none')}, not {theirs.get(what, 'none')}")
    return found


def cited(row: Row) -> str:
    """The paper of a row without what it is about."""
    found = re.search(r"\((.*)\)", row.paper)
    return found[1] if found else row.paper


def line(row: Row) -> str:
    """The row as one line of the table of all: name and page, idea, paper."""
    assert isinstance(row, Algorithm | Preference | Scoring)
    linked = re.sub(r"(?:arXiv )?\b(\d{4}\.\d{5})", r"[\g<0>](https://arxiv.org/abs/\1)", cited(row))
    return f"| [`{row.name}`]({row.name}.md) | {row.idea} | {linked} |"


def index(rows: Sequence[Row]) -> str:
    """The page that leads to those of all rows, Markdown: a table of each kind, and what each needs."""
    kinds = (
        (Algorithm, "Policy gradients and distillation", "`posttrain rl` and `posttrain distill`: the policy samples."),
        (Preference, "Preferences", "`posttrain prefer`: learns from comparisons or labels, without sampling."),
        (Scoring, "Reward models", "`posttrain reward-model`: learns to score replies."),
    )
    lines = ["# Algorithms", "", ABOUT]
    for kind, title, about in kinds:
        lines += [f"## {title}", "", about, "", "| name | idea | paper |", "|---|---|---|"]
        lines += [*(line(row) for row in rows if isinstance(row, kind)), ""]
    return "\n".join([*lines, "## Requirements", "", *requirements(rows), ""])


ABOUT = """\
Which algorithms are there, and what does each compute? An algorithm is a set of components: advantage, surrogate,
aggregation, KL, critic, filters. Each name leads to a page with its objective, its components with paper and equation,
and its differences from GRPO or DPO. `posttrain algorithms NAME` prints the same and lists every setting; `--json` prints
it as data. [The guide](../guides/algorithms.md) shows how to choose one, change a setting or write your own. All policy
gradients have been run on [one common task](../results/algorithms.md).
"""


def requirements(rows: Iterable[Row]) -> list[str]:
    """The table of what methods need, lines of Markdown: those that need the same stand together."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        alike.setdefault(_required(row), []).append(f"`{row.name}`")
    columns = ("method", "rollouts", "reward or reward model", "critic", "reference", "data")
    lines = [", ".join(names) + " | " + " | ".join(required) for required, names in alike.items()]
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *(f"| {line} |" for line in lines)]


@singledispatch
def _required(row: Row) -> tuple[str, ...]:
    """Whether it needs rollouts, a reward, a critic, a reference; and which data."""
    raise NotImplementedError


@_required.register
def _(row: Algorithm) -> tuple[str, ...]:
    data = "prompts" + (", and text" if row.pretraining else ", and a teacher" if row.teacher else "")
    return "yes", _yes(row.reinforces), _yes(row.critic is not None), _yes(Need.REFERENCE in row.needs), data


@_required.register
def _(row: Preference) -> tuple[str, ...]:
    data = "labels of single responses, or comparisons" if row.link.reads_labels else "comparisons of responses"
    return "no", "no", "no", _yes(Need.REFERENCE in row.needs), data


@_required.register
def _(row: Scoring) -> tuple[str, ...]:
    data = "labels or scores of single responses, or of steps" if row.link.reads_labels else "comparisons of responses"
    return "no", "no", "no", "no", data


def _yes(needed: bool) -> str:
    return "yes" if needed else "no"


def settings(row: Row) -> list[str]:
    """Every setting as `--set` takes it, a line each, with its flag where it has a short one."""
    short = {".".join(place): name for name, flag in flags(type(row)).items() for place, _ in flag.places}
    lines = []
    for place, value in settings_of(row).items():
        flag = f"   --{short[place].replace('_', '-')}" if place in short else ""
        lines.append(f"{place}={str(value).lower() if value is None or isinstance(value, bool) else value}{flag}")
    return lines


def as_data(row: Row) -> dict[str, Any]:
    """The same as JSON: name, paper, parts, and every setting by its place."""
    plain: dict[str, Any] = json.loads(
        json.dumps(
            {
                "name": row.name,
                "paper": row.paper,
                "objective": objective(row),
                "parts": [{"what": w, "formula": f, "source": s} for w, f, s in parts(row)],
                "settings": settings_of(row),
            }
        )
    )
    return plain


def symbols(row: Row) -> str:
    """What the letters in its formulas stand for."""
    if isinstance(row, Preference | Scoring):
        return SYMBOLS_OF_PREFERENCES
    return f"{SYMBOLS} {OF_TEACHERS}" if isinstance(row, Algorithm) and row.teacher is not None else SYMBOLS


def axes(row: Preference) -> list[tuple[str, str, str]]:
    """(option, what it makes of a part, source) of the options that change what the row computes beside its numbers."""
    found: list[tuple[str, str, Component]] = []
    if isinstance(row.score, LogRatio):
        for name in ("forward-kl", "jensen-shannon", "alpha"):
            found.append((f"--divergence {name}", "score", change(row, {"divergence": name}).score))
    if isinstance(row.score, LogRatio | ResponseLikelihood) and not row.link.reads_labels:
        found.append(("--tail 0.5", "score", replace(row.score, tail=0.5)))
    if row.weight is None:
        found.append(("--policy-weight", "further weight", PolicyWeight()))
    if row.link.takes_margin:
        found.append(("--row-margins 1", "margin", replace(row.margin or Margin(), scale=1.0)))
    if row.imitation is None:
        found.append(("--imitation 1", "imitation loss", Imitated()))
    found.append(("--denominator prompt", "weight w", change(row, {"denominator": "prompt"}).denominator))
    return [(option, f"{what}: {part.formula}", part.source) for option, what, part in found]


def page(row: Row, beside: Row) -> str:
    """The row's page of the documentation, Markdown. `beside`: the row it is compared with."""
    lines = [
        f"# {row.name}",
        "",
        f"{row.paper}.",
        "",
        f"`{objective(row)}`",
        "",
        "| component | formula | source |",
        "|---|---|---|",
        *(f"| {what} | `{formula}` | {source} |" for what, formula, source in parts(row)),
        "",
    ]
    if isinstance(row, Algorithm) and row.kl is not None and row.kl.where == "reward":
        lines += [f"The KL is in the reward: R_i = reward_i - {row.kl.beta:g} sum_t k, token by token.", ""]
    if row.name != beside.name:
        others = differences(row, beside)
        lines += [f"Differences from `{beside.name}`:", "", *(f"- {line}" for line in others), ""]
    return "\n".join([*lines, *_use(row), symbols(row), ""])


@singledispatch
def _use(row: Row) -> list[str]:
    """The end of its page: figures, options, and how it is used."""
    raise NotImplementedError


@_use.register
def _(row: Algorithm) -> list[str]:
    exact = "Bias of its gradient: [expected gradients](expected-gradients.md)."
    if row.multiplies:
        exact += " [Other weights and their bias](expected-gradients.md#the-weights-of-off-policy-pg)."
    every = f"All settings: `posttrain algorithms {row.name}`. {exact}"
    if row.branching is not None:  # nor any tools
        use = f"`posttrain rl --algorithm {row.name}`"
        return [f"Figures: [agents](../results/agents.md#arpo). Command: {use}. {every}", ""]
    if row.teacher is not None:  # the common task has no teacher
        use = f"`posttrain distill --algorithm {row.name} --teacher FOLDER`"
        return [f"Figures: [distillation](../results/distill.md). Command: {use}. {every}", ""]
    return [
        f"![held-out accuracy over steps, three seeds](curves/{row.name}.png)",
        "",
        "Settings and figures: [the common task](../results/algorithms.md). Command: `posttrain rl --algorithm "
        f"{row.name}`. {every}",
        "",
    ]


@_use.register
def _(row: Preference) -> list[str]:
    return [
        "Variants:",
        "",
        "| option | component | source |",
        "|---|---|---|",
        *(f"| `{option}` | `{formula}` | {source} |" for option, formula, source in axes(row)),
        "",
        f"Command: `posttrain prefer --algorithm {row.name}`. All settings: `posttrain algorithms {row.name}`.",
        "",
    ]


@_use.register
def _(row: Scoring) -> list[str]:
    use = f"`posttrain reward-model --algorithm {row.name}`"
    return [f"Command: {use}. All settings: `posttrain algorithms {row.name}`.", ""]
