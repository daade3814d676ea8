"""Prints how far the peers' answers are from ours, as Markdown. Fails if a difference has no reason, or is gone.

    python benchmarks/peers/compare.py FOLDER

A difference is the largest over all cases, quantities and elements, relative where ours is above 1. Up to 1e-6 is
agreement: peers add 1e-8 to denominators and calculate here and there in float32.
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from exchange import Answers, load_answers

AGREEMENT = 1e-6
PEERS = ("trl", "verl", "openrlhf")
REASONS = {
    (peer, question): " ".join(reason.split())
    for peer, reasons in tomllib.loads(Path(__file__).with_name("reasons.toml").read_text()).items()
    for question, reason in reasons.items()
}


@dataclass(frozen=True)
class Finding:
    peer: str
    question: str
    calls: str
    difference: float

    @property
    def agrees(self) -> bool:
        return self.difference <= AGREEMENT


def distance(ours: Answers, theirs: Answers) -> float:
    """The largest difference, over the cases and quantities that both sides tell; infinite if there are none."""
    found = []
    for key in ours.keys() & theirs.keys():
        mine, other = ours[key], theirs[key]
        assert mine.shape == other.shape, f"{key}: {mine.shape} here, {other.shape} there"
        found.append(float((abs(mine - other) / abs(mine).clip(1.0)).max(initial=0.0)))
    return max(found, default=float("inf"))


def findings(folder: Path) -> tuple[list[Finding], dict[str, str], list[str]]:
    """What was found, the versions, and our questions that no peer answers."""
    ours, about = load_answers("posttrain", folder)
    found, versions = [], {f"{name} (posttrain)": version for name, version in about["versions"].items()}
    for peer in PEERS:
        theirs, told = load_answers(peer, folder)
        versions |= {
            name if name == peer else f"{name} ({peer})": version for name, version in told["versions"].items()
        }
        for question, answers in theirs.items():
            difference = distance(ours[question.split(" @ ")[0]], answers)
            found.append(Finding(peer, question, told["calls"][question], difference))
    answered = {finding.question.split(" @ ")[0] for finding in found}
    return found, versions, [question for question in ours if question not in answered]


def shown_number(difference: float) -> str:
    return f"{difference:.0e}" if difference else "0"


def matrix(found: list[Finding]) -> list[str]:
    """A row for each question, a column for each peer."""
    lines = [f"| question | {' | '.join(PEERS)} |", "|---" * (len(PEERS) + 1) + "|"]
    for question in sorted({finding.question for finding in found}):
        cells = {finding.peer: finding for finding in found if finding.question == question}
        shown = [
            "" if peer not in cells else shown_number(cells[peer].difference) if cells[peer].agrees else "**differs**"
            for peer in PEERS
        ]
        lines.append(f"| {question} | {' | '.join(shown)} |")
    return lines


def differences(found: list[Finding]) -> list[str]:
    lines = ["| peer | question | by | reason |", "|---|---|---|---|"]
    for finding in found:
        if not finding.agrees:
            reason = REASONS.get((finding.peer, finding.question), "NOT EXPLAINED")
            asked = f"{finding.question} (`{finding.calls}`)"
            lines.append(f"| {finding.peer} | {asked} | {shown_number(finding.difference)} | {reason} |")
    return lines


def main(folder: Path) -> int:
    found, versions, unanswered = findings(folder)
    print("Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".\n")
    for peer in PEERS:
        own = [finding.agrees for finding in found if finding.peer == peer]
        print(f"- {peer}: {sum(own)} of {len(own)} answers agree")
    print("\n## Largest difference\n", *matrix(found), sep="\n")
    print("\nAnswered by no peer: " + (", ".join(unanswered) or "none") + ".")
    print("\n## The differences and their reasons\n", *differences(found), sep="\n")
    seen = {(finding.peer, finding.question): finding.agrees for finding in found}
    wrong = [
        f"{key}: no reason for the difference" for key, agrees in seen.items() if not agrees and key not in REASONS
    ]
    wrong += [f"{key}: a reason, but no difference" for key in REASONS if seen.get(key, True)]
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
