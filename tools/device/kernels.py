"""Molt's own kernels beside plain operations on the card: same values, and milliseconds.

python -m tools.device.kernels --limit-s 60

head      log-probs and entropies of sampled tokens, forward and backward, over 151,936 entries
digests   sums of 4,096 expert matrices and of one embedding
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tools.device.parts import Parts, parser

EXPERT = (768, 2048)
"""A matrix of an expert of Qwen3-30B-A3B."""
NUM_EXPERTS = 4096
EMBEDDING = (151_936, 2048)
REPEATS = 5


def main() -> int:
    """All kernels; 0 when none failed."""
    arguments = parser(__doc__).parse_args()
    parts = Parts("kernels", arguments.out, work=arguments.work, limit_s=arguments.limit_s)
    parts.run("head", lambda facts: facts.update(compare_heads(151_936)))
    parts.run("digests", compare_digests)
    parts.table()
    return int(any("error" in facts for facts in parts.facts.values()))


def compare_heads(vocab_size: int, *, num_tokens: int = 8192, hidden_size: int = 1024) -> dict[str, Any]:
    """The trainer's fused head beside the plain one on a GPU in bf16: largest differences, and milliseconds of forward and backward."""
    import torch

    from molt.learn import fused_head
    from molt.learn.logprob import Vocabulary, _HeadLogprobs

    seed = torch.Generator("cuda").manual_seed(0)
    options: dict[str, Any] = {"generator": seed, "device": "cuda", "dtype": torch.bfloat16}
    hidden = torch.randn(num_tokens, hidden_size, **options)
    weight = torch.randn(vocab_size, hidden_size, **options) * 0.03
    target = torch.randint(0, vocab_size, (num_tokens,), generator=seed, device="cuda")
    heat = torch.ones(num_tokens, device="cuda")
    slope = torch.randn(num_tokens, generator=seed, device="cuda")

    def fused(h: torch.Tensor, w: torch.Tensor) -> Any:
        return fused_head.head_logprobs(h, w, None, target, heat)

    def plain(h: torch.Tensor, w: torch.Tensor) -> Any:
        return _HeadLogprobs.apply(h, w, None, target, heat, True, Vocabulary(None))

    found: dict[str, Any] = {}
    facts: dict[str, Any] = {"is_usable": fused_head.is_usable(hidden)}
    for name, head in (("fused", fused), ("plain", plain)):
        for is_timed in (False, True):
            h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            torch.cuda.synchronize()
            began = time.perf_counter()
            logp, entropy = head(h, w)
            (slope * logp).sum().backward()
            torch.cuda.synchronize()
            if is_timed:
                facts[f"{name}_ms"] = round(1000 * (time.perf_counter() - began), 2)
                found[name] = (logp.detach(), entropy.detach(), h.grad, w.grad)
    for what, one, other in zip(("logp", "entropy", "grad_hidden", "grad_weight"), *found.values(), strict=True):
        facts[f"{what}_gap"] = float((one.float() - other.float()).abs().max() / other.float().abs().max())
    return facts


def compare_digests(facts: dict[str, Any]) -> None:
    """Milliseconds and equality of sums of many small tensors and of a large one; of the small ones, microseconds each."""
    from molt.rollout import digest

    seed = torch.Generator("cuda").manual_seed(0)
    options: dict[str, Any] = {"generator": seed, "device": "cuda", "dtype": torch.bfloat16}
    experts = [torch.randn(EXPERT, **options) for _ in range(8)] * (NUM_EXPERTS // 8)
    embedding = [torch.randn(EMBEDDING, **options)]
    for name, tensors in (("experts", experts), ("embedding", embedding)):
        data = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        of_kernel, by_kernel = _fastest(digest.sums_by_kernel, data)
        of_plain, by_plain = _fastest(lambda parts: [digest.plain_sums(part) for part in parts], data)
        assert torch.equal(of_kernel, of_plain), f"sums of {name} differ"
        size = sum(tensor.nbytes for tensor in tensors)
        facts[name] = {
            "num_tensors": len(tensors),
            "gib": round(size / 2**30, 2),
            "kernel_ms": round(1000 * by_kernel, 2),
            "plain_ms": round(1000 * by_plain, 2),
            "kernel_us_a_tensor": round(1e6 * by_kernel / len(tensors), 1),
            "plain_us_a_tensor": round(1e6 * by_plain / len(tensors), 1),
            "kernel_gb_s": round(size / by_kernel / 1e9),
        }


def _fastest(sums: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]], data: Sequence[torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Sums of all, and the fewest seconds of some turns after one that does not count."""
    seconds = []
    for _ in range(1 + REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        found = torch.cat(sums(data))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return found, min(seconds[1:])


if __name__ == "__main__":
    raise SystemExit(main())
