"""The optimizers of --optimizer: AdamW of this package, and classes with the interface of torch.optim.

A class is imported when it is chosen: torch.optim imports torch's compiler, which takes seconds.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.extras import install, installed
from posttrain.core.messages import near_or_all
from posttrain.core.types import UserError
from posttrain.learners.adamw import AdamW
from posttrain.learners.host_memory import OffloadedOptimizer
from posttrain.learners.library_optimizer import LibraryOptimizer, Optimizer
from posttrain.learners.muon import Muon, is_hidden
from posttrain.system.user_code import load_named

BETAS = (0.9, 0.999)
"""The default of --betas, at which a class of a library keeps its own."""
EPS = 1e-8


@dataclass(frozen=True)
class OptimizerRow:
    """An optimizer that --optimizer names."""

    place: str  # its class, as package.module:Class; "": `AdamW` of this package
    options: Mapping[str, Any] = field(default_factory=dict)  # where they differ from the class's defaults
    by_number: bool = False  # whether a number of a weight changes by its own gradients alone, as --shard requires
    rates_of_adamw: bool = False  # whether learning rates that suit AdamW suit it
    extra: str = ""  # the extra of the package that installs it


_LIKE_ADAM = ("Adam", "Adamax", "NAdam", "RAdam")
_MUON = "torch.optim:Muon"
ROWS: dict[str, OptimizerRow] = {
    "adamw": OptimizerRow("", by_number=True, rates_of_adamw=True),
    "adamw8bit": OptimizerRow("bitsandbytes.optim:AdamW8bit", rates_of_adamw=True, extra="qlora"),
    # Steps have the size of the learning rate, as in transformers, and not that of the matrix times the rate. The square of
    # the first number bounds squared gradients, by 1e-30 as in the paper; torch's own is too large for those of a model.
    "adafactor": OptimizerRow("torch.optim:Adafactor", {"eps": (1e-15, 1.0)}, rates_of_adamw=True),
    "lion": OptimizerRow("bitsandbytes.optim:Lion", extra="qlora"),
    # times 0.2 sqrt(max(A, B)) (Moonlight, arXiv 2502.16982, equation 4), with which AdamW's learning rates suit it
    "muon": OptimizerRow(_MUON, {"adjust_lr_fn": "match_rms_adamw"}, rates_of_adamw=True),
    "sgd": OptimizerRow("torch.optim:SGD", {"momentum": 0.9}, by_number=True),
    **{
        name.lower(): OptimizerRow(f"torch.optim:{name}", by_number=True, rates_of_adamw=name in _LIKE_ADAM)
        for name in (*_LIKE_ADAM, "Adadelta", "Adagrad", "ASGD", "RMSprop", "Rprop")
    },
}
"""Name -> optimizer. Beside these, any class by its place."""


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer and its settings: --optimizer, --optimizer-options and --betas."""

    name: str = "adamw"
    options: Mapping[str, Any] = field(default_factory=dict)
    betas: tuple[float, float] = BETAS
    eps: float = EPS  # of AdamW

    @property
    def row(self) -> OptimizerRow:
        """The row of the name. Raises UserError if there is none."""
        if self.name in ROWS:
            return ROWS[self.name]
        if ":" not in self.name:
            raise UserError(f"--optimizer {self.name:.60} is unknown{near_or_all(self.name, [*ROWS, 'my.py:Class'])}")
        known = next((row for row in ROWS.values() if row.place == self.name), OptimizerRow(self.name))
        return replace(known, options={}, rates_of_adamw=False)  # with its own defaults

    @property
    def takes_rates_of_adamw(self) -> bool:
        """Whether what is known of AdamW's learning rates holds for it."""
        return self.row.rates_of_adamw and not self.options

    @property
    def in_chunks(self) -> bool:
        """Whether it updates each weight by itself. A class that is not of the table may update all weights together."""
        return self.row.place in {row.place for row in ROWS.values()}

    def check(self, divided: str = "", offloads: bool = False) -> None:
        """Try the optimizer. Raises UserError, in one line, for names, settings and classes that cannot be used.

        `divided`: the option that divides matrices among processes; "": none. `offloads`: see `open`.
        """
        if offloads and self.row.extra:
            raise UserError(
                f"--offload optimizer has not been tried with --optimizer {self.name}, a class of bitsandbytes: leave "
                "out one of them"
            )
        if divided and not self.row.by_number:
            known = ", ".join(name for name, row in ROWS.items() if row.by_number)
            raise UserError(
                f"--optimizer {self.name} may need whole matrices, and {divided} splits them: leave out {divided}, "
                f"or choose one of {known}"
            )
        tried = nn.Parameter(torch.zeros(2, 2))
        self.open([{"params": [tried], "weight_decay": 0.0, "hidden": True}], 1.0)

    def open(
        self,
        groups: Sequence[dict[str, Any]],
        lr: float,
        rows: Mapping[Tensor, Sequence[int]] | None = None,
        offloads: bool = False,
        wrap: Callable[[Optimizer], Optimizer] | None = None,
    ) -> Optimizer:
        """Create the optimizer for `groups` of parameters. `rows`: see `Muon`. `offloads`: its state is on the host
        between updates. `wrap`: called with each optimizer that steps weights, which Muon has two of. Raises UserError as
        `check` does.
        """
        row = self.row

        def held(created: Optimizer) -> Optimizer:
            created = OffloadedOptimizer(created, self.in_chunks) if offloads else created
            return created if wrap is None else wrap(created)

        if not row.place:
            eps = self._settings(AdamW, ("eps",)).get("eps", self.eps)
            _check_kind("eps", eps, EPS)
            if not 0 <= eps < math.inf:
                raise UserError(f"--optimizer-options eps must be at least 0, not {eps}")
            return held(AdamW(groups, lr, self.betas, eps))
        if row.extra and not installed(library := row.place.partition(".")[0]):
            raise UserError(f"--optimizer {self.name} needs {library}, which is not installed: {install(row.extra)}")
        kind = load_named(row.place)
        takes = self._parameters(kind)
        settings = {**row.options, **self._settings(kind)}
        if "weight_decay" in takes:
            settings["weight_decay"] = 0.0
        created = partial(LibraryOptimizer, self.name, kind, lr=lr, options=settings)
        if row.place == _MUON:
            others = partial(AdamW, lr=lr, betas=self.betas, eps=self.eps)
            return Muon(groups, rows or {}, lambda own: held(created(own)), lambda own: held(others(own)))
        if self.betas != BETAS and "betas" not in takes:
            raise UserError(f"--betas has no effect with --optimizer {self.name}: leave it out")
        if self.betas != BETAS:
            settings.setdefault("betas", self.betas)
        return held(created(groups))

    def _parameters(self, kind: Any) -> Mapping[str, inspect.Parameter]:
        try:
            return inspect.signature(kind).parameters
        except (TypeError, ValueError):  # it cannot be called, or is not written in Python
            raise UserError(
                f"--optimizer {self.name} is no optimizer of torch: name a class such as torch.optim:SGD"
            ) from None

    def _settings(self, kind: Any, takes: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the options for a class. Raises UserError for those that it does not take."""
        parameters = self._parameters(kind)
        known = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        known = list(takes or known[1:])  # the first are the parameters
        anything = takes is None and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        for name in self.options:
            if name in ("lr", "weight_decay"):
                raise UserError(f"--optimizer-options {name}: give it as --{name.replace('_', '-')}")
            if name not in known and not anything:
                free = [own for own in known if own not in ("lr", "weight_decay")]
                raise UserError(f"--optimizer-options: {self.name} has no {name[:60]!r}{near_or_all(name, free)}")
            _check_kind(name, self.options[name], parameters[name].default if name in parameters else None)
        return dict(self.options)


def _check_kind(name: str, value: Any, default: Any) -> None:
    """Raise UserError for a value of another kind than the default: a class may take the text "no" for true."""
    if isinstance(default, bool):
        fits, wanted = isinstance(value, bool), "true or false"
    else:
        fits, wanted = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    if isinstance(default, int | float) and not fits:
        raise UserError(f"--optimizer-options {name} is {wanted}, not {value!r:.60}")


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], share: float, weight_decay: float, choice: OptimizerChoice
) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer: matrices are decayed, norms and biases are not.

    `share`: ratio of the learning rate to the schedule's. With Muon, "hidden" groups are its own.
    """
    decayed = {n for n, p in parameters.items() if p.ndim >= 2 and "norm" not in n and not n.endswith("bias")}
    inner = {n for n in decayed if is_hidden(n, parameters[n])} if choice.row.place == _MUON else set[str]()
    vectors = [p for name, p in parameters.items() if name not in decayed]
    groups = [{"params": vectors, "weight_decay": 0.0, "share": share}]
    matrices = [p for name, p in parameters.items() if name in decayed - inner]
    groups.insert(0, {"params": matrices, "weight_decay": weight_decay, "share": share})
    if inner:
        hidden = [p for name, p in parameters.items() if name in inner]
        groups.insert(0, {"params": hidden, "weight_decay": weight_decay, "share": share, "hidden": True})
    return groups
