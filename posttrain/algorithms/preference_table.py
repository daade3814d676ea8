"""Table of preference algorithms, which learn from preferences without sampling.

The ideas of wpo and ld-dpo go with other algorithms too: --policy-weight and --tail.

Left out: DiscoPOP (arXiv 2406.08414), a link found by a search over code: it has no derivation, and is not convex.
"""

from __future__ import annotations

from posttrain.algorithms.links import (
    AnchoredDown,
    AnchoredUp,
    ClassifierLink,
    Contrast,
    Hinge,
    Prospect,
    ReverseKL,
    Robust,
    SelfPlay,
    Sigmoid,
    Square,
)
from posttrain.algorithms.moving_models import MovingReference
from posttrain.algorithms.optimal_transport import OptimalTransport
from posttrain.algorithms.preference import Imitated, Margin, PreferenceAlgorithm
from posttrain.algorithms.responses import LogRatio, Odds, PolicyWeight, ResponseLikelihood

_ALGORITHMS = (
    PreferenceAlgorithm(
        "dpo",
        "Direct preference optimization (DPO, arXiv 2305.18290)",
        link=Sigmoid(0.1),
        idea="A reward model that is the policy itself",
        best_for="pairs: the first to try",
    ),
    PreferenceAlgorithm(
        "tr-dpo",
        "Trust-region DPO: the reference follows the policy (TR-DPO, arXiv 2404.09656, soft update)",
        link=Sigmoid(0.1),
        moving=MovingReference(rate=0.6),
        idea="DPO whose reference moves with the policy",
        best_for="long runs on pairs that go far from their start",
    ),
    PreferenceAlgorithm(
        "cdpo",
        "Conservative DPO: some labels are assumed to be wrong (Mitchell 2023)",
        link=Sigmoid(0.1, smoothing=0.1),
        idea="Label smoothing",
        best_for="pairs of which some labels are wrong",
    ),
    PreferenceAlgorithm(
        "robust",
        "Robust DPO: an unbiased loss under flipped labels (arXiv 2403.00409)",
        link=Robust(0.1, noise=0.1),
        idea="Unbiased under label noise",
        best_for="pairs with a known share of wrong labels",
    ),
    PreferenceAlgorithm(
        "dpo-norm",
        "Length-normalised DPO (Tulu 3, arXiv 2411.15124, section 5.1.2)",
        link=Sigmoid(5.0),
        score=LogRatio(mean=True),
        idea="Log ratios are means over tokens",
        best_for="pairs of very different lengths",
    ),
    PreferenceAlgorithm(
        "ld-dpo",
        "Length-desensitised DPO (LD-DPO, arXiv 2409.06411); its alpha, tuned for each model there, is 0.5 here",
        link=Sigmoid(0.1),
        score=LogRatio(tail=0.5),
        idea="Tokens beyond the shorter response count less",
        best_for="pairs whose chosen responses are mostly longer",
    ),
    PreferenceAlgorithm(
        "wpo",
        "Weighted preference optimization (WPO, arXiv 2406.11827), beta as in its authors' models",
        link=Sigmoid(0.01),
        weight=PolicyWeight(),
        idea="Comparisons count by the policy's own probability",
        best_for="pairs that other models wrote",
    ),
    PreferenceAlgorithm(
        "ipo",
        "Identity preference optimization, per token as its authors confirmed (IPO, arXiv 2310.12036)",
        link=Square(0.1),
        score=LogRatio(mean=True),
        idea="The difference approaches a target, not infinity",
        best_for="labels without noise, which dpo would overfit",
    ),
    PreferenceAlgorithm(
        "hinge",
        "Hinge loss on the log ratio (SLiC-HF, arXiv 2305.10425; RSO, arXiv 2309.06657)",
        link=Hinge(0.1),
        idea="Won comparisons are left alone",
        best_for="pairs that need to be won by a margin, not more",
    ),
    PreferenceAlgorithm(
        "kto",
        "Kahneman-Tversky optimization, from labels of single responses (KTO, arXiv 2402.01306)",
        link=Prospect(0.1),
        idea="Good and bad labels instead of pairs",
        best_for="good and bad labels without pairs",
    ),
    PreferenceAlgorithm(
        "orpo",
        "Odds-ratio preference optimization (ORPO, arXiv 2403.07691)",
        link=Sigmoid(1.0),
        score=Odds(),
        coefficient=0.1,
        imitation=Imitated(1.0),
        idea="Fine-tuning and comparing at once, no reference",
        best_for="a base model and pairs, in one stage",
    ),
    PreferenceAlgorithm(
        "cpo",
        "Contrastive preference optimization, its likelihood per token as in its authors' code (CPO, arXiv 2401.08417)",
        link=Sigmoid(0.1),
        score=ResponseLikelihood(),
        imitation=Imitated(1.0),
        idea="DPO under a uniform reference, with likelihood",
        best_for="good chosen responses, no memory for a reference",
    ),
    PreferenceAlgorithm(
        "simpo",
        "Simple preference optimization (SimPO, arXiv 2405.14734)",
        link=Sigmoid(2.0),
        score=ResponseLikelihood(mean=True),
        margin=Margin(1.0),
        idea="Mean likelihood as reward, with a margin",
        best_for="pairs, no memory for a reference",
    ),
    PreferenceAlgorithm(
        "alphapo",
        "AlphaPO: SimPO with a reward of another shape (arXiv 2501.03884, its settings for Mistral)",
        link=Sigmoid(2.5),
        score=ResponseLikelihood(mean=True, alpha=0.25),
        margin=Margin(0.1),
        idea="SimPO whose reward bends for unlikely responses",
        best_for="as simpo, with one more setting to tune",
    ),
    PreferenceAlgorithm(
        "rpo",
        "DPO with the likelihood of the chosen responses (iterative RPO, arXiv 2404.19733)",
        link=Sigmoid(0.1),
        imitation=Imitated(1.0, per="responses"),
        idea="DPO that keeps chosen responses likely",
        best_for="reasoning, where chosen responses must stay likely",
    ),
    PreferenceAlgorithm(
        "sppo",
        "Self-play preference optimization with hard labels (SPPO, arXiv 2405.00675)",
        link=SelfPlay(0.001),
        idea="A target for each response by itself",
        best_for="rounds of self-play",
    ),
    PreferenceAlgorithm(
        "apo-zero",
        "Anchored preference optimization, zero (APO, arXiv 2408.06266)",
        link=AnchoredUp(0.1),
        idea="Chosen responses become likelier, rejected ones unlikelier",
        best_for="chosen responses better than the policy's own",
    ),
    PreferenceAlgorithm(
        "apo-down",
        "Anchored preference optimization, down (APO, arXiv 2408.06266)",
        link=AnchoredDown(0.1),
        idea="Both responses become unlikelier, the rejected one more",
        best_for="chosen responses worse than the policy's own",
    ),
    PreferenceAlgorithm(
        "nca",
        "Noise contrastive alignment (NCA, arXiv 2402.05369)",
        link=Contrast(0.1),
        idea="Keeps the likelihood of chosen responses up",
        best_for="chosen responses that should not become unlikely",
    ),
    PreferenceAlgorithm(
        "exo",
        "Efficient exact optimization (EXO, arXiv 2402.00856)",
        link=ReverseKL(0.1),
        idea="Reverse KL to the labels' preference",
        best_for="a policy that should concentrate on the best responses",
    ),
    PreferenceAlgorithm(
        "bco",
        "Binary classifier optimization, without density ratios (BCO, arXiv 2404.04656)",
        link=ClassifierLink(0.1),
        idea="A classifier of good and bad responses",
        best_for="responses that are good or bad by themselves",
    ),
    PreferenceAlgorithm(
        "aot",
        "Alignment via optimal transport, paired, sorted over the optimizer batch (AOT, arXiv 2406.05882)",
        link=Sigmoid(0.1),
        transport=OptimalTransport("paired"),
        idea="Sorted margins above the reference's sorted ones",
        best_for="pairs that are noisy one by one, in large batches",
    ),
    PreferenceAlgorithm(
        "aot-unpaired",
        "Alignment via optimal transport, unpaired, sorted over the optimizer batch (AOT, arXiv 2406.05882)",
        link=Sigmoid(0.1),
        transport=OptimalTransport("unpaired"),
        idea="Good scores dominate bad ones, at every quantile",
        best_for="good and bad labels without pairs, in large batches",
    ),
)
PREFERENCES: dict[str, PreferenceAlgorithm] = {algorithm.name: algorithm for algorithm in _ALGORITHMS}
