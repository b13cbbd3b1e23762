"""The check that packed rows keep apart, asked of random mixtures in bf16: how near its limit is a model that leaks nothing?

python -m tools.device.apart --limit-s 60 [--rehearse]

A router sends a token elsewhere for a last bit, and kernels may cut their tiles elsewhere in other company: both move scores, and a
run must not be refused for them. Each shape is asked with several seeds, through both classes of the trainer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tools.device.attention import policy_of
from tools.device.models import make_moe_model
from tools.device.parts import Parts, parser

SHAPES: dict[str, dict[str, int]] = {
    "wide": {"hidden_size": 1024, "num_layers": 6, "num_experts": 64, "top_k": 8},
    "deep": {"hidden_size": 512, "num_layers": 32, "num_experts": 128, "top_k": 8, "expert_size": 128},
    "sharp": {"hidden_size": 1024, "num_layers": 12, "num_experts": 32, "top_k": 1},
}
"""Arguments of make_moe_model: many layers add up, and one expert a token makes each choice matter most."""
SMALL = {"tiny": {"hidden_size": 128, "num_layers": 2, "num_experts": 8, "top_k": 2, "expert_size": 64, "vocab_size": 512}}
NUM_SEEDS = 2


def main() -> int:
    """All shapes and classes; 0 when none failed."""
    arguments = parser(__doc__).parse_args()
    is_small = arguments.rehearse
    parts = Parts("apart", arguments.out, work=arguments.work, limit_s=arguments.limit_s)

    def ask(name: str, shape: dict[str, int], implementation: str, facts: dict[str, Any]) -> None:
        from molt.learn.apart import LIMIT, rows_apart

        found = []
        for seed in range(1 if is_small else NUM_SEEDS):
            model = make_moe_model(arguments.work / f"apart-{name}-{seed}", seed=seed, **shape)
            policy = policy_of(model, implementation, "sdpa", "bfloat16")
            found.append(rows_apart(partial(_score, policy), num_entries=policy.scorer.lm.config.vocab_size))
        asked = [one for one in found if one is not None]
        facts |= {"leaks": [one.leak for one in asked], "noises": [one.noise for one in asked], "limit": LIMIT, "num_asked": len(asked)}
        if any(max(one.leak, one.noise) > LIMIT for one in asked):
            raise AssertionError(f"a model that keeps rows apart would be refused: {facts}")

    for implementation in ("hf",) if is_small else ("hf", "automodel"):
        for name, shape in (SMALL if is_small else SHAPES).items():
            parts.run(f"{implementation}-{name}", lambda facts, i=implementation, n=name, s=shape: ask(n, s, i, facts))
    parts.table()
    return int(any("error" in facts for facts in parts.facts.values()))


def _score(policy: Any, packed: Any) -> Any:
    return policy.score(packed)[0]


if __name__ == "__main__":
    raise SystemExit(main())
