"""The preference algorithm of a run: the chosen one with the run's settings. Refuses contradictions."""

from __future__ import annotations

from posttrain.algorithms.all_algorithms import find_preference
from posttrain.algorithms.preference import PreferenceAlgorithm
from posttrain.algorithms.responses import LogRatio
from posttrain.algorithms.settings import change, check_ranges
from posttrain.config.training import Prefer
from posttrain.core.component import Need
from posttrain.core.types import UserError
from posttrain.training.weight_types import refuse_rounded_moves


def chosen_preference(config: Prefer) -> PreferenceAlgorithm:
    """Return the algorithm of a run.

    Raises UserError, in one line, if its settings do not exist, do not fit or have no effect.
    """
    algorithm = change(find_preference(config.algorithm), config.settings)
    check_ranges(algorithm)
    margin = algorithm.margin
    if margin is not None and (margin.constant or margin.scale) and not algorithm.link.takes_margin:
        raise UserError(
            f"{algorithm.name}: --margin and --row-margins have no effect, as its loss has no margin: leave them out, or "
            "choose --link sigmoid or hinge"
        )
    _check_transport(algorithm, config)
    if algorithm.reads_labels and getattr(algorithm.score, "tail", 1.0) != 1:
        raise UserError(f"{algorithm.name}: labels are of single responses, none is the shorter one: leave out --tail")
    if algorithm.moving is not None:
        if Need.REFERENCE not in algorithm.needs:
            raise UserError(f"{algorithm.name}: --reference-every has no effect, as it has no reference: leave it out")
        refuse_rounded_moves(config, "--reference-update-rate", algorithm.moving.rate)
    return algorithm


def _check_transport(algorithm: PreferenceAlgorithm, config: Prefer) -> None:
    """Raise UserError if sorted distributions cannot be compared with these settings."""
    if algorithm.transport is None:
        return
    data = algorithm.transport.data
    score = algorithm.score
    linear = isinstance(score, LogRatio) and score.divergence == "reverse-kl"
    told = {
        f"--transport {data} compares differences of scores: choose --link sigmoid, robust, square, hinge or reverse-kl": (
            not algorithm.link.of_difference
        ),
        "--transport paired sorts margins of policy and reference: it needs --score log-ratio and the reverse KL": (
            data == "paired" and not linear
        ),
        "--policy-weight weighs pairs, and --transport compares across pairs: leave out --policy-weight": algorithm.weight
        is not None,
        "--row-margins are margins of pairs, and --transport compares across pairs: leave out --row-margins": (
            algorithm.margin is not None and algorithm.margin.scale > 0
        ),
        "it sorts the scores of an optimizer batch: --rows must be at least 2": config.rows < 2,
    }
    for reason, broken in told.items():
        if broken:
            raise UserError(f"{algorithm.name}: {reason}")
