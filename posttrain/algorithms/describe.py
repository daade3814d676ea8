"""Descriptions of algorithms: in plain mathematics, as data, and as pages of the documentation.

All descriptions are derived from the algorithm's components.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import singledispatch
from pathlib import Path
from typing import Any

from posttrain.algorithms.algorithm_base import AlgorithmBase
from posttrain.algorithms.branching import PAPER
from posttrain.algorithms.optimal_transport import OptimalTransport
from posttrain.algorithms.policy import Algorithm
from posttrain.algorithms.preference import Imitated, Margin, PreferenceAlgorithm
from posttrain.algorithms.responses import LogRatio, PolicyWeight, ResponseLikelihood
from posttrain.algorithms.reward_model_table import RewardModelAlgorithm
from posttrain.algorithms.settings import change, flags, settings_of
from posttrain.core.component import Component, Need
from posttrain.core.messages import dashed

SYMBOLS = (
    "Symbols: lp, old, ref, mu: log-probability of a sampled token under the policy, the policy before the step's "
    "updates, "
    "the reference, the engine. B: number of rollouts; n_i: trained tokens of rollout i; R_i: its reward; m_i: all its "
    "sampled tokens; budget: the maximum of m_i. sg(): stop-gradient. A is 0 after the last token."
)
OF_TEACHERS = "p, q: the policy's and the teacher's probabilities over the vocabulary; tea: log q of a sampled token."
SYMBOLS_OF_PREFERENCES = (
    "Symbols: lp, ref: log-probability of a token of a response under the policy and the reference; n: tokens of the "
    "response. s: score of a response; s_w, s_l: of the better and of the worse one of a comparison; margin: 0 where no "
    "component sets one. w: weight of a comparison c or of a label v; all weights add up to 1 over the optimizer batch. "
    "sigma(x) = 1 / (1 + exp(-x))."
)


@singledispatch
def components(algorithm: AlgorithmBase) -> list[tuple[str, str, str]]:
    """Return (name, formula, source) of every component. Names are the same for all algorithms of a table."""
    raise NotImplementedError


@components.register
def _(algorithm: Algorithm) -> list[tuple[str, str, str]]:
    ratio = " then ".join(step.formula for step in algorithm.ratio) or "exp(lp - old)"
    steps = "; ".join(step.source for step in algorithm.ratio) or "PPO, arXiv 1707.06347, section 3"
    found = [("advantage A", algorithm.advantage.formula, algorithm.advantage.source)]
    if algorithm.teacher is not None:
        what = "added to A, token by token" if algorithm.teacher.sampled else "divergence D from the teacher"
        found.append((what, algorithm.teacher.formula, algorithm.teacher.source))
    if algorithm.reinforces:
        found.append(("maximised per token", algorithm.surrogate.formula, algorithm.surrogate.source))
    if algorithm.reinforces and algorithm.surrogate.uses_ratio:
        found.append(("ratio r", ratio, steps))
        if algorithm.old == "sampler":
            found.append(("old", "the policy that sampled", "PPO, arXiv 1707.06347, section 3"))
    found.append(("weight w of a token", algorithm.aggregate.formula, algorithm.aggregate.source))
    if algorithm.kl is not None:
        before = "the policy that sampled" if algorithm.old == "sampler" else "the policy before the update"
        whom = "the reference" if algorithm.kl.against == "reference" else before
        found.append(
            (
                f"KL to {whom}, in the {algorithm.kl.where}",
                f"{algorithm.kl.beta:g} x {algorithm.kl.formula}",
                algorithm.kl.source,
            )
        )
        if algorithm.kl.control is not None:
            found.append(("control of beta", algorithm.kl.control.formula, algorithm.kl.control.source))
    named = (
        (
            "entropy bonus" if algorithm.entropy is None else f"entropy bonus in the {algorithm.entropy.where}",
            algorithm.entropy,
        ),
        ("off-policy mask", algorithm.off_policy_mask),
        *(("selected tokens", chosen) for chosen in algorithm.select),
        ("covariance penalty", algorithm.covariance),
        ("correction for the engine", algorithm.correction),
        ("critic loss", algorithm.critic),
        ("rollouts of a group", algorithm.branching),
        ("groups", algorithm.sampling),
        *(("rollouts", chosen) for chosen in algorithm.filters),
        *(("reward shaping", shape) for shape in algorithm.shaping),
        ("final reward of a token", algorithm.redistribution),
        ("imitation loss", algorithm.imitation),
        ("pretraining loss", algorithm.pretraining),
        ("step", algorithm.trust_region),
        ("end of a step's updates", algorithm.early_stop),
        ("replay", algorithm.replay),
        ("reference", algorithm.moving),
    )
    found += [(what, part.formula, part.source) for what, part in named if part is not None]
    if algorithm.branching is not None:
        found.append(("A of shared tokens", algorithm.branching.sharing, f"{PAPER}, section 3.2"))
    epochs = f", in {algorithm.epochs} epochs of {algorithm.minibatches}" if algorithm.epochs > 1 else ""
    return [
        *found,
        (
            "updates per step",
            f"{algorithm.epochs * algorithm.minibatches}{epochs}{_ratio_note(algorithm)}",
            algorithm.stated,
        ),
    ]


def _ratio_note(algorithm: Algorithm) -> str:
    """Return the note for algorithms with one update per step, whose ratio is exactly 1; "" for others."""
    if not (algorithm.on_policy and algorithm.surrogate.uses_ratio and algorithm.old == "start"):
        return ""
    return " (so r is exactly 1" + (" and nothing is clipped)" if algorithm.surrogate.clips else ")")


@components.register
def _(algorithm: PreferenceAlgorithm) -> list[tuple[str, str, str]]:
    found = [
        ("loss", algorithm.link.formula, algorithm.link.source),
        ("score s of a response", algorithm.score.formula, algorithm.score.source),
        ("weight w", algorithm.denominator.formula, algorithm.denominator.source),
    ]
    named = (
        ("quantile k", algorithm.transport),
        ("margin", algorithm.margin),
        ("further weight", algorithm.weight),
        ("imitation loss", algorithm.imitation),
        ("reference", algorithm.moving),
    )
    return found + [(what, part.formula, part.source) for what, part in named if part is not None]


@components.register
def _(algorithm: RewardModelAlgorithm) -> list[tuple[str, str, str]]:
    found = [
        ("loss", algorithm.link.formula, algorithm.link.source),
        ("weight w of a comparison", algorithm.denominator.formula, algorithm.denominator.source),
    ]
    named = (("margin", algorithm.margin), ("penalty", algorithm.penalty))
    return found + [(what, part.formula, part.source) for what, part in named if part is not None]


@singledispatch
def objective(algorithm: AlgorithmBase) -> str:
    """Return the objective in one line."""
    raise NotImplementedError


@objective.register
def _(algorithm: PreferenceAlgorithm) -> str:
    of = f"{algorithm.coefficient:g} x " if algorithm.coefficient != 1 else ""
    inside = "sum_v w_v loss(s)" if algorithm.link.reads_labels else "sum_c w_c loss(s_w, s_l)"
    if algorithm.transport is not None:
        inside = "sum_k w_k loss(s_w, s_l)"
    return f"minimise  {of}{inside}" + (" + imitation" if algorithm.imitation else "")


@objective.register
def _(algorithm: RewardModelAlgorithm) -> str:
    if algorithm.link.reads_labels:
        return "minimise  sum_v w_v loss(s, y)"
    return "minimise  sum_c w_c loss(s_w, s_l)" + (" + penalty" if algorithm.penalty else "")


@objective.register
def _(algorithm: Algorithm) -> str:
    inside = algorithm.surrogate.formula if algorithm.reinforces else ""
    if algorithm.correction is not None and algorithm.reinforces:
        inside = f"c {inside}"
    if algorithm.off_policy_mask is not None and algorithm.reinforces:
        inside = f"M {inside}"
    if algorithm.kl is not None and algorithm.kl.where == "loss":
        inside += f" - {algorithm.kl.beta:g} k"
    if algorithm.widens:
        inside += " + alpha H"
    if algorithm.teacher is not None and not algorithm.teacher.sampled:
        inside += f" - {algorithm.teacher.coefficient:g} D"
    inside = inside.removeprefix(" + ").strip()
    outside = [
        part for part, there in (("critic's loss", algorithm.critic), ("imitation", algorithm.imitation)) if there
    ]
    outside += ["pretraining"] if algorithm.pretraining else []
    return f"maximise  sum_i sum_t w_i [ {inside} ]" + "".join(f" - {part}" for part in outside)


def _reward(algorithm: Algorithm) -> str:
    """Return the reward of a rollout including KL penalty and entropy bonus; "" if neither is in the reward."""
    kl, entropy = algorithm.kl, algorithm.entropy
    inside = f" - {kl.beta:g} sum_t k" if kl is not None and kl.where == "reward" else ""
    inside += f" - {entropy.coefficient:g} sum_t lp" if entropy is not None and entropy.where == "reward" else ""
    return f"R_i = reward_i{inside}" if inside else ""


def describe(algorithm: AlgorithmBase) -> list[str]:
    """Return the description in plain mathematics, one line per component."""
    lines = [f"{algorithm.name}: {algorithm.paper}"]
    lines += [f"  best for: {use}"] if (use := best_for(algorithm)) else []
    lines.append(f"  {objective(algorithm)}")
    if isinstance(algorithm, Algorithm) and (reward := _reward(algorithm)):
        lines.append(f"  {reward}, each token's share within its own reward")
    for what, formula, source in components(algorithm):
        lines.append(f"  {what}: {formula}" + (f"   [{source}]" if source else ""))
    return lines


def differences(algorithm: AlgorithmBase, other: AlgorithmBase) -> list[str]:
    """Return the differences from the other algorithm, one line each; [] if there are none."""
    own, theirs = ({what: formula for what, formula, _ in components(r)} for r in (algorithm, other))
    found = []
    for what in [*own, *(w for w in theirs if w not in own)]:
        if own.get(what) != theirs.get(what):
            found.append(f"{what}: {own.get(what, 'none')}, not {theirs.get(what, 'none')}")
    return found


def cited(algorithm: AlgorithmBase) -> str:
    """Return the citation in the paper field, without further text of the field."""
    found = re.search(r"\((.*)\)", algorithm.paper)
    return found[1] if found else algorithm.paper


def line(algorithm: AlgorithmBase) -> str:
    """Return one line of the index table: name with a link to its page, idea, paper."""
    assert isinstance(algorithm, Algorithm | PreferenceAlgorithm | RewardModelAlgorithm)
    linked = re.sub(r"(?:arXiv )?\b(\d{4}\.\d{5})", r"[\g<0>](https://arxiv.org/abs/\1)", cited(algorithm))
    return f"| [`{algorithm.name}`]({algorithm.name}.md) | {algorithm.idea} | {linked} |"


def index(algorithms: Sequence[AlgorithmBase]) -> str:
    """Return the index page of all algorithms, Markdown: a table of each kind, and the requirements."""
    kinds = (
        (Algorithm, "Policy gradients and distillation", "`posttrain rl` and `posttrain distill`: the policy samples."),
        (
            PreferenceAlgorithm,
            "Preferences",
            "`posttrain prefer`: learns from comparisons or labels, without sampling.",
        ),
        (RewardModelAlgorithm, "Reward models", "`posttrain reward-model`: learns to score replies."),
    )
    lines = ["# Algorithms", "", ABOUT]
    for kind, title, about in kinds:
        lines += [f"## {title}", "", about, "", "| name | idea | paper |", "|---|---|---|"]
        lines += [*(line(algorithm) for algorithm in algorithms if isinstance(algorithm, kind)), ""]
    return "\n".join([*lines, "## Requirements, and when to take which", "", USES, "", *requirements(algorithms), ""])


ABOUT = """\
Which algorithms are there, and what does each compute? An algorithm is a set of components: advantage, surrogate,
aggregation, KL, critic, filters. Each name leads to a page with its objective, its components with paper and equation,
and its differences from GRPO or DPO. `posttrain algorithms NAME` prints the same and lists every setting; `--json` prints
it as data. [The guide](../guides/algorithms.md) shows how to choose one, change a setting or write your own. Most policy
gradients have been run on [one common task](../results/algorithms.md); their pages show the curve.
"""
USES = """\
The last column follows from what each algorithm changes. Only "ahead of", "behind", "safer", times and gains are measured:
on [sums](../results/algorithms.md), on [worked sums](../results/algorithms-worked-sums.md), with [other sources of the
reward](../results/grid.md) and with [agents](../results/agents.md).
"""


def requirements(algorithms: Iterable[AlgorithmBase]) -> list[str]:
    """Return the table of requirements and uses as lines of Markdown, one line for each algorithm."""
    columns = ("method", "rollouts", "reward or reward model", "critic", "reference", "data", "best for")
    lines = [[f"`{algorithm.name}`", *_required(algorithm), best_for(algorithm)] for algorithm in algorithms]
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *(f"| {' | '.join(line)} |" for line in lines)]


def best_for(algorithm: AlgorithmBase) -> str:
    """Return when to take the algorithm; "" if that is not known."""
    assert isinstance(algorithm, Algorithm | PreferenceAlgorithm | RewardModelAlgorithm)
    return algorithm.best_for


def _required(algorithm: AlgorithmBase) -> tuple[str, ...]:
    """Return the cells of the requirements table: rollouts, reward, critic, reference (yes or no), and the data."""
    reference = _yes(Need.REFERENCE in algorithm.needs)
    if isinstance(algorithm, Algorithm):
        data = "prompts" + (", and text" if algorithm.pretraining else ", and a teacher" if algorithm.teacher else "")
        return "yes", _yes(algorithm.reinforces), _yes(algorithm.critic is not None), reference, data
    data = "comparisons of responses"
    if isinstance(algorithm, PreferenceAlgorithm) and algorithm.reads_labels:
        data = "labels of single responses, or comparisons"
    elif isinstance(algorithm, RewardModelAlgorithm) and algorithm.link.reads_labels:
        data = "labels or scores of single responses, or of steps"
    return "no", "no", "no", reference, data


def _yes(needed: bool) -> str:
    return "yes" if needed else "no"


def settings(algorithm: AlgorithmBase) -> list[str]:
    """Return one line for every setting, in the form that `--set` accepts, with its flag if it has one."""
    short = {".".join(place): name for name, flag in flags(type(algorithm)).items() for place, _ in flag.places}
    lines = []
    for place, value in settings_of(algorithm).items():
        flag = f"   {dashed(short[place])}" if place in short else ""
        lines.append(f"{place}={str(value).lower() if value is None or isinstance(value, bool) else value}{flag}")
    return lines


def as_data(algorithm: AlgorithmBase) -> dict[str, Any]:
    """Return the description as JSON data: name, paper, components, and every setting by its place."""
    plain: dict[str, Any] = json.loads(
        json.dumps(
            {
                "name": algorithm.name,
                "paper": algorithm.paper,
                "best_for": best_for(algorithm),
                "objective": objective(algorithm),
                "parts": [{"what": w, "formula": f, "source": s} for w, f, s in components(algorithm)],
                "interpretations": interpretations(algorithm),
                "settings": settings_of(algorithm),
            }
        )
    )
    return plain


def interpretations(algorithm: AlgorithmBase) -> list[str]:
    """Return how its components interpret what their papers leave open, a sentence or two each."""
    return list(dict.fromkeys(part.interpretation for _, part in algorithm.components if part.interpretation))


def symbols(algorithm: AlgorithmBase) -> str:
    """Return the explanation of the letters in an algorithm's formulas."""
    if isinstance(algorithm, PreferenceAlgorithm | RewardModelAlgorithm):
        return SYMBOLS_OF_PREFERENCES
    return f"{SYMBOLS} {OF_TEACHERS}" if isinstance(algorithm, Algorithm) and algorithm.teacher is not None else SYMBOLS


def axes(algorithm: PreferenceAlgorithm) -> list[tuple[str, str, str]]:
    """Return (option, resulting component, source) of the options that change a formula, not only its numbers."""
    found: list[tuple[str, str, Component]] = []
    transported = algorithm.transport is not None  # the margins and weights of single responses have no place then
    weighted = algorithm.weight is not None
    paired = transported and not algorithm.reads_labels
    if isinstance(algorithm.score, LogRatio) and not paired:
        for name in ("forward-kl", "jensen-shannon", "alpha"):
            found.append((f"--divergence {name}", "score", change(algorithm, {"divergence": name}).score))
    score = algorithm.score
    if isinstance(score, LogRatio | ResponseLikelihood) and score.tail == 1 and not algorithm.reads_labels:
        found.append(("--tail 0.5", "score", replace(score, tail=0.5)))
    if algorithm.link.of_difference and not transported and not weighted:
        if isinstance(algorithm.score, LogRatio):
            found.append(("--transport paired", "quantile k", OptimalTransport("paired")))
        found.append(("--transport unpaired", "quantile k", OptimalTransport("unpaired")))
    if not weighted and not transported:
        found.append(("--policy-weight", "further weight", PolicyWeight()))
    if algorithm.link.takes_margin and not transported:
        found.append(("--row-margins 1", "margin", replace(algorithm.margin or Margin(), scale=1.0)))
    if algorithm.imitation is None:
        found.append(("--imitation 1", "imitation loss", Imitated()))
    found.append(("--denominator prompt", "weight w", change(algorithm, {"denominator": "prompt"}).denominator))
    return [(option, f"{what}: {part.formula}", part.source) for option, what, part in found]


COMMON_TASKS = {"curves": ("sums", "algorithms.md"), "curves-worked-sums": ("worked sums", "algorithms-worked-sums.md")}
"""Folder of the curves of a task that all algorithms learn -> its name, and its page of results."""


def curves_in(folder: Path, algorithm: AlgorithmBase) -> list[str]:
    """Return the names in `COMMON_TASKS` under which `folder` has a curve of the algorithm."""
    return [name for name in COMMON_TASKS if (folder / name / f"{algorithm.name}.png").exists()]


def page(algorithm: AlgorithmBase, beside: AlgorithmBase, measured: Sequence[str]) -> str:
    """Return the algorithm's page of the documentation, as Markdown.

    `beside`: the algorithm that it is compared with; `measured`: the result of `curves_in`.
    """
    lines = [
        f"# {algorithm.name}",
        "",
        f"{algorithm.paper}." + (f" Best for: {use}." if (use := best_for(algorithm)) else ""),
        "",
        f"`{objective(algorithm)}`",
        "",
        "| component | formula | source |",
        "|---|---|---|",
        *(f"| {what} | `{formula}` | {source} |" for what, formula, source in components(algorithm)),
        "",
    ]
    if isinstance(algorithm, Algorithm) and (reward := _reward(algorithm)):
        lines += [f"In the reward, token by token: {reward}.", ""]
    lines += [line for part in interpretations(algorithm) for line in (part, "")]
    if algorithm.name != beside.name:
        others = differences(algorithm, beside)
        lines += [f"Differences from `{beside.name}`:", "", *(f"- {line}" for line in others), ""]
    return "\n".join([*lines, *_use(algorithm, measured), symbols(algorithm), ""])


@singledispatch
def _use(algorithm: AlgorithmBase, measured: Sequence[str]) -> list[str]:
    """Return the last part of an algorithm's page: figures, options, and the command."""
    raise NotImplementedError


@_use.register
def _(algorithm: Algorithm, measured: Sequence[str]) -> list[str]:
    exact = "Bias of its gradient: [expected gradients](expected-gradients.md)."
    if algorithm.multiplies:
        exact += " [Other weights and their bias](expected-gradients.md#the-weights-of-off-policy-pg)."
    every = f"All settings: `posttrain algorithms {algorithm.name}`. {exact}"
    if algorithm.branching is not None:  # the common task has no tools
        use = f"`posttrain rl --algorithm {algorithm.name}`"
        return [f"Figures: [agents](../results/agents.md#arpo). Command: {use}. {every}", ""]
    if algorithm.teacher is not None:  # the common task has no teacher
        use = f"`posttrain distill --algorithm {algorithm.name} --teacher FOLDER`"
        return [f"Figures: [distillation](../results/distill.md). Command: {use}. {every}", ""]
    if not measured:
        return [f"Command: `posttrain rl --algorithm {algorithm.name}`. {every}", ""]
    pictures = [
        f"![held-out accuracy over steps on {COMMON_TASKS[name][0]}]({name}/{algorithm.name}.png)" for name in measured
    ]
    tasks = " and ".join(f"[{COMMON_TASKS[name][0]}](../results/{COMMON_TASKS[name][1]})" for name in measured)
    return [
        *(line for picture in pictures for line in (picture, "")),
        f"Settings and figures: {tasks}. Command: `posttrain rl --algorithm {algorithm.name}`. {every}",
        "",
    ]


@_use.register
def _(algorithm: PreferenceAlgorithm, measured: Sequence[str]) -> list[str]:
    return [
        "Variants:",
        "",
        "| option | component | source |",
        "|---|---|---|",
        *(f"| `{option}` | `{formula}` | {source} |" for option, formula, source in axes(algorithm)),
        "",
        f"Command: `posttrain prefer --algorithm {algorithm.name}`. All settings: `posttrain algorithms "
        f"{algorithm.name}`.",
        "",
    ]


@_use.register
def _(algorithm: RewardModelAlgorithm, measured: Sequence[str]) -> list[str]:
    use = f"`posttrain reward-model --algorithm {algorithm.name}`"
    return [f"Command: {use}. All settings: `posttrain algorithms {algorithm.name}`.", ""]
