"""The page docs/evidence.md: what was measured, read out of docs/evidence/*.json so that no figure is copied by hand."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

EVIDENCE = Path(__file__).resolve().parent.parent / "docs" / "evidence"


def page() -> str:
    """All sections; each names its files, whose head has the command, versions and card."""
    lines = _text(
        "What was measured, and where it fell short. Each file in `docs/evidence/` was written by the program that ran; its head has",
        "the command, the versions and the card. `docs/log.md` says what was learned from it.",
    )
    for section in (learning, overlap, two_gpus, layouts, mixture, switches, attention, engines, faults, log):
        lines += ["", *section()]
    return "\n".join(lines) + "\n"


def learning() -> list[str]:
    """Rewards by lag, beside the published scores of AReaL."""
    table = _parts("learns")["table"]
    published, step = table["published"], table["steps_of_all_runs"]
    rows = []
    for name, cell in table.items():
        if not name.startswith("lag "):
            continue
        lag, correction, dtype = name.removeprefix("lag ").split(", ")
        is_decoupled, kept = "decoupled" in correction, cell["geo_share"]
        rewards = [_mean(cell[when]) for when in ("first", "last", "last_at_common_step")]
        score = published.get(lag, [None, None])[is_decoupled]
        shares = [_number(kept["same_version"]), _number(kept["all"])]
        rows.append([lag, "yes" if is_decoupled else "no", dtype, cell["num_seeds"], *rewards, *shares, "" if score is None else score])
    head = ["max_lag", "decoupled", "dtype", "seeds", "first", "last", f"step {step}", "kept, same version", "kept, all", "AReaL"]
    return [
        "## It learns",
        "",
        *_text(
            "SmolLM2-135M-Instruct on sums of one digit, asynchronously, through the log (`learns.json`, `lags.svg`): mean reward of the",
            f"first and last steps of a run, and around step {step}, which all runs reached; 95 % intervals where there are three seeds.",
            "Kept: the share of tokens that geo [0.99, 1.01] would keep, of those of the trainer's own version and of all. The last",
            "column is AIME24 of AReaL's own model as published; only the shape compares.",
        ),
        "",
        *_table(head, rows),
    ]


def overlap() -> list[str]:
    """Both halves beside what they are made of, and asynchronous beside synchronous steps."""
    whole, rollouts, training = _parts("overlap"), _parts("halves-rollouts")["ratios"], _parts("halves-training")["ratios"]
    ratios = rollouts["by_turns"]
    turns = f"tokens/s of rollouts to vLLM alone on the same prompts, {len(ratios)} turns, {min(ratios):.2f} to {max(ratios):.2f} each"
    return [
        "## Rollout beside training",
        "",
        "A random model of Qwen3-0.6B's shape (`overlap.json` on two cards, `halves-rollouts.json` and `halves-training.json` on one).",
        "",
        *_table(["what", "ratio", "goal"], [
            [turns, _number(rollouts["rollouts_to_alone"]), ">= 0.95"],
            ["tokens/s of training to a bare FSDP2 loop on the same rows", _number(training["training_to_bare"]), ">= 0.95"],
            ["MFU of training, of the bare loop", f"{training['training_mfu']:.1%}, {training['bare_mfu']:.1%}", ""],
            ["rollouts while a policy trains to vLLM alone", _number(whole["ratios"]["rollout_while_training_to_alone"]), ""],
            ["step time, asynchronous to synchronous", _number(whole["ratios"]["async_to_sync_step"]), ""],
            ["share of the log in a step", f"{whole['ratios']['log_share']:.2%}", "<= 1 %"],
        ]),
    ]  # fmt: skip


def two_gpus() -> list[str]:
    """Trainer and engine apart."""
    parts = _parts("two_gpus")
    lineage, agree, scored, rate = parts["lineage"], parts["ranks_agree"], parts["rescored"], parts["refits"]["gb_per_s"]
    return [
        "## Trainer and engine on two cards",
        "",
        "`two_gpus.json`, weights by NCCL broadcast, answers kept through refits.",
        "",
        *_table(["what", "figure"], [
            ["broadcast, GB/s: median, best, first", f"{rate['median']:.1f}, {rate['best']:.1f}, {rate['first']:.1f}"],
            ["segments of several versions", f"{lineage['num_mixed']} of {lineage['num_segments']}"],
            ["versions whose engines differ from each other, from the trainer",
             f"{len(lineage['versions_without_equal_engines'])}, {len(lineage['versions_unlike_the_trainer'])}"],
            ["tokens scored again by the version they name, by the one beside it (nat)", f"{scored['own']:.4f}, {scored['neighbour']:.3f}"],
            ["two ranks to one: largest difference of loss, of gradient norm",
             f"{max(agree['loss_apart']):.1e}, {max(agree['grad_norm_apart']):.1e}"],
        ]),
    ]  # fmt: skip


def layouts() -> list[str]:
    """Recorded steps trained again in other layouts."""
    parts = _parts("layouts")
    rows = []
    for name, apart in parts["parity of layouts"].items():
        if name in ("tolerance", "seconds", "alone"):
            continue
        own, told = (parts["run: ep2"], "ep2, an engine beside it") if name == "recorded" else (parts[f"again: {name}"], name)
        rows.append([told, f"{apart['grad_norm']:.1e}", f"{apart['entropy']:.1e}", *_cost(own)])
    rows.append(["one rank", "", "", *_cost(parts["again: alone"])])
    return [
        "## Layouts of trainer ranks",
        "",
        *_text(
            f"`layouts.json`: a mixture of {parts['world']['parameters'] / 1e9:.2f} x 10^9 parameters, routes replayed; steps",
            "recorded with ep2, then trained again from the log. Differences are the largest of four steps, as shares of one rank's. A",
            "model this small fills no two cards. The first card held 5 to 6 GiB of what made the model, too.",
        ),
        "",
        *_table(["layout", "gradient norm", "entropy", "tokens/s a card", "GiB, fullest card"], rows),
    ]  # fmt: skip


def _cost(part: dict[str, Any]) -> list[str]:
    return [f"{part['tokens_per_gpu_s']:,.0f}", f"{max(part['memory_gib'].values()):.0f}"]


def mixture() -> list[str]:
    """Distance of engine and trainer, without and with replay."""
    parity, runs = _parts("moe-parity"), _parts("moe-runs")
    rows = [
        [row["variant"], f"{row['num_tokens']:,}", *(_number(row[key]) for key in ("mean", "max", "k3", "agreement_mean"))]
        for row in [*parity["parity"]["rows"], *parity["fp8"]["rows"]]
    ]
    preempted, quiet, ratio = parity["routes"]["preempted"], parity["routes"]["quiet"], runs["ratio"]
    return [
        "## A mixture of experts, without and with routing replay",
        "",
        "`moe-parity.json`, random weights, whose logits are wide: distance in nat a token; expert agreement is the share in common.",
        "",
        *_table(["variant", "tokens", "mean", "largest", "k3", "agreement"], rows),
        "",
        *_text(
            f"Over 20 training steps (`moe-runs.json`) `vllm_kl` (k3) is {ratio['k3_without']:.4f} without and {ratio['k3_with']:.4f} with",
            f"replay. Calls that were preempted ({preempted['num_preemptions']} times) agree with an undisturbed pass in",
            f"{preempted['mean']:.3f} of the experts, quiet ones in {quiet['mean']:.3f}.",
        ),
    ]


def switches() -> list[str]:
    """Ratios of settings on and off, beside what Molt published."""
    own, prefix = _parts("trade_offs")["ratios"], _parts("trade_offs")["prefix"]
    one, all_of_it = (_parts("trade_offs-trainer")["ratios"][f"offload_{mode}"] for mode in ("optimizer", "full"))
    told, known = own["published"], _number(prefix["graphs"]["again_prefill_s"])
    memory = told["offload"]["peak_gb_optimizer"] / told["offload"]["peak_gb_none"]
    drafts = told["mtp"]["generation_s_off"] / told["mtp"]["generation_s_on"]
    return [
        "## What switches cost and give",
        "",
        *_text(f"`trade_offs.json`, `trade_offs-trainer.json`. {told['differs']}"),
        "",
        *_table(["switch", "ours", "published"], [
            ["optimizer offload: memory, step time", f"{one['peak_gib']:.2f}, {one['step_s']:.2f}",
             f"{memory:.2f}, {told['offload']['train_time_ratio']}"],
            ["full offload: memory, step time", f"{all_of_it['peak_gib']:.2f}, {all_of_it['step_s']:.2f}", ""],
            ["CUDA graphs: tokens/s at 1, 64 calls", f"{own['graphs']['1']:.1f}, {own['graphs']['64']:.1f}", ""],
            ["prefix cache: time of later turns", _number(own["prefix"]["later_turns_s"]), ""],
            ["prefix cache: seconds to prefill a known prompt", known, told["prefix"]["warm_prefill_s"]],
            ["draft head: tokens/s at 1, 64 calls", f"{own['mtp']['1']:.2f}, {own['mtp']['64']:.2f}", f"{drafts:.1f}"],
        ]),
    ]  # fmt: skip


def attention() -> list[str]:
    """Every attention of both model seams, and the check of every run at its start."""
    parts, mixtures = _parts("attention"), _parts("apart")
    rows = [
        [name, f"{cell['mean_from_plain']:.4f}", f"{cell['leak_max']:g}", f"{cell['step_ms']:.0f}"]
        for name, cell in parts.items()
        if "leak_max" in cell
    ]
    num_asked = sum(cell["num_asked"] for cell in mixtures.values())
    most = max(max(cell["leaks"] + cell["noises"]) for cell in mixtures.values())
    limit = next(iter(mixtures.values()))["limit"]
    return [
        "## Attention over packed rows",
        "",
        *_text(
            f"`attention.json`: {parts['plain']['num_tokens']:,} tokens of {parts['plain']['num_rows']} rows in bf16. Distance from plain",
            "float32, row by row (nat); the most that a row moves when another is changed; milliseconds of a forward and backward pass.",
        ),
        "",
        *_table(["seam and kernel", "mean distance", "leak", "ms"], rows),
        "",
        *_text(
            f"`apart.json`: the check of packed rows at the start of a run, asked of {num_asked} random mixtures in bf16: at most {most:g}",
            f"of what a row's own change moves; it refuses from {limit:g} on.",
        ),
    ]  # fmt: skip


def engines() -> list[str]:
    """Text through AutoModel, pictures, drafts."""
    one, pictures, drafts = _parts("automodel"), _parts("images"), _parts("drafts")
    tower = _parts("images-learning")
    num_well = sum(tower[verb]["exit_code"] == 0 for verb in ("audit_learning", "replay_learning"))
    drafted = ", ".join(f"{drafts[when]['gap']['mean']:.4f}" for when in ("before", "after"))
    return [
        "## Engine and trainer",
        "",
        *_table(["what", "nat a token", "file"], [
            ["SmolLM2 through NeMo AutoModel, bf16", _number(one["parity_automodel"]["report"]["rows"][0]["mean"]), "`automodel.json`"],
            ["a random model of SmolVLM-256M's shape that sees pictures", _number(pictures["parity"]["report"]["rows"][0]["mean"]),
             "`images.json`"],
            ["with a draft head, before and after a refit", drafted, "`drafts.json`"],
        ]),
        "",
        *_text(
            "A run whose image tower learns is audited, and replayed from the log with the pictures gone:",
            f"{num_well} of 2 went well (`images-learning.json`).",
        ),
    ]  # fmt: skip


def faults() -> list[str]:
    """What was killed on the card."""
    parts = _parts("kills")
    audit, rows = parts["audit"], parts["rows"]
    lost, seen = sum(rows["num_lost_or_changed"].values()), sum(rows["num_seen"].values())
    return [
        "## Killed on the card",
        "",
        *_text(
            f"`kills.json`: an engine's core killed in the middle of {parts['engine']['num_rollouts_tried_again']} answers,",
            f"another's actor in the middle of {parts['engine_actor']['num_rollouts_tried_again']}, all tried again;",
            "a trainer rank killed in a step: the run",
            f"ended in {parts['trainer']['ended_after_s']:.0f} s by name, and `--resume` went on from step",
            f"{parts['resume']['resumed_from_step']}. Generated tokens {audit['generated']:,},",
            f"accounted {audit['accounted']:,}; {lost} of {seen:,} rows seen before were lost or changed.",
        ),
    ]


def log() -> list[str]:
    """What the log was to show, by file; figures are in the files."""
    rows = []
    for file in sorted(EVIDENCE.glob("*.json")):
        for claim, is_shown in (json.loads(file.read_text()).get("claims") or {}).items():
            rows.append([claim, "yes" if is_shown else "**no**", f"`{file.name}`"])
    return ["## The log and its limits, on two CPU cores", "", *_table(["claim", "shown", "file"], rows)]


def _parts(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((EVIDENCE / f"{name}.json").read_text())["parts"]
    return found


def _text(*parts: str) -> list[str]:
    return textwrap.wrap(" ".join(parts), 140, break_long_words=False, break_on_hyphens=False)


def _mean(interval: dict[str, float]) -> str:
    return f"{interval['mean']:.3f}" + ("" if math.isnan(interval["half"]) else f" +- {interval['half']:.3f}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [[*head], ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]
