"""Mistakes that change nothing that could be noticed, each with the reason."""

from __future__ import annotations

from mutating.operators import Mutant

SAME_LENGTHS = "strict=True is an assertion of our own: the lengths are equal"
NO_GRAPH = ".item() is a number, with or without a graph"
ONE_AXIS = "these tensors have one axis"
COMMUTES = "it takes its arguments in any order"
COST = "it decides how much is done at once, or looked at, and no result"
ANNOTATION = "types are not looked at when the code runs"
SQUARED = "the difference is squared"
EQUIVALENT: dict[tuple[str, str, str, str], str] = {
    ("learners/natural_step.py", "start = ", "nn.utils.parameters_to_vector(parameters).detach().clone()",
     "nn.utils.parameters_to_vector(parameters).detach()"): "parameters_to_vector copies already",
    ("learners/local_learner.py", "free = ", 'limit <= 0 or (self.trust_region is not None and part.name == "policy")',
     "(limit <= 0)"): "the natural step has the length that the KL allows, whatever that of the gradient",
    ("learners/natural_gradient.py", "residual, direction = ", "b.clone()", "b"): "nothing is changed in place",
    ("learners/natural_gradient.py", "return nothing", "return nothing", "pass"):
        "a gradient of 0 gives a direction of 0 without curvature, which is no step either",
    ("algorithms/earned_rewards.py", "own.flip(0)", "0", "(-1)"): ONE_AXIS,
    ("algorithms/ratio.py", "cumsum(0)", "0", "(-1)"): ONE_AXIS,
    ("algorithms/ratio.py", "torch.cat([running", "0", "(-1)"): ONE_AXIS,
    ("algorithms/critic_loss.py", "bounded = ", "moved - batch.returns", "(batch.returns - moved)"): SQUARED,
    ("algorithms/critic_loss.py", "error = ", "outputs.value - batch.returns", "(batch.returns - outputs.value)"): SQUARED,
    ("algorithms/policy.py", "exact = ", "~old.isfinite()", "old.isfinite()"): "what it weakens is an assertion of our own",
    ("engines/request.py", "len(s.encode())", "4", "5"): "a wider window finds the same stop strings",
    ("models/losses/likelihood.py", "return in_chunks(kl,", "0", "1"): "it decides only how large the chunks are",
    ("training/sources/packing.py", "last = ", "s.learned and s.length", "s.learned"): "a transcript has no empty spans",
    ("algorithms/earned_rewards.py", ".flip(0)", "0", "(-1)"): ONE_AXIS,
    ("algorithms/ratio.py", ".cumsum(0)", "0", "(-1)"): ONE_AXIS,
    ("algorithms/earned_rewards.py", "groups = int(", "0", "1"): "where there are no rollouts, nothing is looked up",
    ("algorithms/policy.py", "return frozenset[str]()", "frozenset[str]", "frozenset"): ANNOTATION,
    ("core/types.py", "Verdict = ", "float | dict[str, float]", "float"): ANNOTATION,
    ("core/types.py", "Verdict = ", "float | dict[str, float] | Graded", "Graded"): ANNOTATION,
    ("training/sources/task_order.py", "cursor: int", "False", "True"): "nobody gives it",
    ("training/sources/diversity.py", "GROUPS = ", "16", "15"): COST,
    ("training/sources/diversity.py", "GROUPS = ", "16", "17"): COST,
    ("training/sources/sft_source.py", "rows = [[t]", "sorted(transcripts, key=len)", "list(transcripts)"): COST,
    ("training/sources/packing.py", "logp", "x is not None", "True"): "used only where none is None",
    ("training/sources/packing.py", "behind", "fork > prompt", "(fork >= prompt)"): "there is a cut behind the prompt already",  # noqa: E501
    ("learners/natural_gradient.py", "square.item()", "square.item() <= 1e-10 * start", "(square.item() < 1e-10 * start)"):
        "no sum of squares is that very number",
    ("models/losses/likelihood.py", "chunk = ", "CHUNK_LOGITS // vocabulary", "CHUNK_LOGITS"): COST,
    ("models/native/linear.py", "manual_seed", "0", "1"): "any random numbers will do",
    ("models/native/linear.py", "if collects(", "collects(self.weight) and torch.is_grad_enabled()", "collects(self.weight)"):  # noqa: E501
        "without gradients it is the same product",
    ("engines/request.py", "len(s.encode())", "4", "3"): "three bytes of a character that was cut are all there can be",
    ("engines/local/local_engine.py", "keep = ", "sorted(set(range(count)) - set(out))", "list(set(range(count)) - set(out))"):  # noqa: E501
        "sets of small numbers are in order",
    ("engines/local/local_engine.py", "free >= max", "self.slots // 8", "self.slots"): COST,
    ("engines/local/local_engine.py", "free >= max", "not self.running or free >= max(1, self.slots // 8)",
     "(not self.running and free >= max(1, self.slots // 8))"): COST,
    ("engines/local/local_engine.py", "min(self.slots, waiting)", "min(self.slots, waiting)", "self.slots"): COST,
    ("training/sources/model_outputs.py", "torch.zeros(0)", "0", "1"): "every place is written to",
    ("algorithms/reward_model_table.py", "self.measure(", "scores.detach()", "scores"): NO_GRAPH,
    ("core/types.py", "as most are", "return np.array(self.logp, dtype=np.float32)", "pass"):
        "a shorter way to the same numbers",
    ("learners/fsdp.py", "of replicated parameters", "2", "3"): "the first two are read",
    ("learners/process_group.py", "for other in sorted(missing)", "sorted(missing)", "list(missing)"):
        "each is asked by itself, in whatever order",
    ("models/native/linear.py", "return to_bias, *(None", "learned(linear)[1:]", "learned(linear)[1 - 1:]"):
        "torch ignores a None behind the last argument",
}  # fmt: skip
"""(module, a piece of the statement, what is replaced, by what) -> why it is none."""


def reason(mutant: Mutant) -> str:
    """Why it is no mistake; "": it is one."""
    if mutant.kind == "constant" and mutant.before == "True" and "strict=True" in mutant.statement:
        return SAME_LENGTHS
    if mutant.kind == "detach" and ".item()" in mutant.statement and mutant.before.endswith(".detach()"):
        return NO_GRAPH
    if mutant.kind == "arguments swapped" and mutant.before.startswith(
        ("max(", "min(", "torch.minimum(", "torch.maximum(", "torch.logaddexp(")
    ):
        return COMMUTES
    for (module, piece, before, after), why in EQUIVALENT.items():
        if (module, before, after) == (mutant.module, mutant.before, mutant.after) and piece in mutant.statement:
            return why
    return ""
