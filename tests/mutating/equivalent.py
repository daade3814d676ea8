"""Mistakes that change nothing that could be noticed, each with the reason."""

from __future__ import annotations

from mutating.operators import Mutant

SAME_LENGTHS = "strict=True is an assertion of our own: the lengths are equal"
NO_GRAPH = ".item() is a number, with or without a graph"
ONE_AXIS = "these tensors have one axis"
COMMUTES = "min and max take their arguments in any order"
SQUARED = "the difference is squared"
EQUIVALENT: dict[tuple[str, str, str, str], str] = {
    ("learners/local.py", "start = ", "nn.utils.parameters_to_vector(parameters).detach().clone()",
     "nn.utils.parameters_to_vector(parameters).detach()"): "parameters_to_vector copies already",
    ("learners/local.py", "free = ", 'limit <= 0 or (self.trust_region is not None and part.name == "policy")',
     "(limit <= 0)"): "the natural step has the length that the KL allows, whatever that of the gradient",
    ("learners/natural.py", "residual, direction = ", "b.clone()", "b"): "nothing is changed in place",
    ("learners/natural.py", "return nothing", "return nothing", "pass"):
        "a gradient of 0 gives a direction of 0 without curvature, which is no step either",
    ("algorithms/credit.py", "own.flip(0)", "0", "(-1)"): ONE_AXIS,
    ("algorithms/ratio.py", "cumsum(0)", "0", "(-1)"): ONE_AXIS,
    ("algorithms/ratio.py", "torch.cat([running", "0", "(-1)"): ONE_AXIS,
    ("algorithms/critic.py", "bounded = ", "moved - batch.returns", "(batch.returns - moved)"): SQUARED,
    ("algorithms/critic.py", "error = ", "outputs.value - batch.returns", "(batch.returns - outputs.value)"): SQUARED,
    ("algorithms/policy.py", "exact = ", "~old.isfinite()", "old.isfinite()"): "what it weakens is an assertion of our own",
    ("engines/request.py", "len(s.encode())", "4", "5"): "a wider window finds the same stop strings",
    ("models/likelihood.py", "return in_chunks(kl,", "0", "1"): "it decides only how large the chunks are",
    ("sources/packing.py", "last = ", "s.learned and s.length", "s.learned"): "a transcript has no empty spans",
    ("sources/views.py", "torch.zeros(0)", "0", "1"): "every place is written to",
}  # fmt: skip
"""(module, a piece of the statement, what is replaced, by what) -> why it is none."""


def reason(mutant: Mutant) -> str:
    """Why it is no mistake; "": it is one."""
    if mutant.kind == "constant" and mutant.before == "True" and "strict=True" in mutant.statement:
        return SAME_LENGTHS
    if mutant.kind == "detach" and ".item()" in mutant.statement and mutant.before.endswith(".detach()"):
        return NO_GRAPH
    if mutant.kind == "arguments swapped" and mutant.before.startswith(("max(", "min(")):
        return COMMUTES
    for (module, piece, before, after), why in EQUIVALENT.items():
        if (module, before, after) == (mutant.module, mutant.before, mutant.after) and piece in mutant.statement:
            return why
    return ""
