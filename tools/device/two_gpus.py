"""Trainer and engine on a card each: refits by broadcast, versions that change inside answers, two FSDP2 ranks beside one.

python -m tools.device.two_gpus --limit-s 280 [--rehearse] [--no-kill]

One run trains a random model of Qwen3-0.6B's layers, with long answers that go on across refits; near its end the engine's process is
killed, so that its successor must join a new broadcast. Its first steps are then trained again from the log by one rank and by two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from tools.device.kills import Killer, wait_until
from tools.device.models import make_dense_model
from tools.device.parts import ROOT, Child, Parts, flags, molt, parser
from tools.device.readings import events_of, steps_of
from tools.device.world import World, make_world

NUM_AGAIN = 4
"""Steps that are trained again by one rank and by two."""
TOLERANCE = {"float32": {"loss": 1e-5, "grad_norm": 1e-4}, "bfloat16": {"loss": 2e-3, "grad_norm": 2e-2}}
"""Two ranks against one: |loss| apart, and grad_norm apart as a share. Both sum the same rows; the order of sums, and in bf16 the
split of a batch into kernels, differ."""
NUM_RESCORED = 8


def main() -> int:
    """All parts; 0 when none failed."""
    made = parser(__doc__)
    made.add_argument("--no-kill", action="store_true", help="leave the engine alone")
    made.add_argument("--steps", type=int, default=14)
    two = TwoGpus(made.parse_args())
    parts = two.parts
    if parts.run("world", two.make_world):
        parts.run("apart", two.train, needs_s=100)
        if two.run_dir.is_dir():
            parts.run("refits", two.refits)
            parts.run("lineage", two.lineage)
            parts.run("audit", two.audit, needs_s=15)
            parts.run("one_rank", lambda facts: asyncio.run(two.train_again(facts, num_ranks=1)), needs_s=40)
            parts.run("two_ranks", lambda facts: asyncio.run(two.train_again(facts, num_ranks=2)), needs_s=35)
            parts.run("ranks_agree", two.ranks_agree)
            parts.run("rescored", two.rescore, needs_s=10)
    parts.table()
    return int(any("error" in facts for facts in parts.facts.values()))


class TwoGpus:
    """The parts, and what one hands to the next."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.is_rehearsal: bool = arguments.rehearse
        self.work: Path = arguments.work
        self.parts = Parts("two_gpus", arguments.out, work=arguments.work, limit_s=arguments.limit_s)
        self.world: World | None = None
        self.model: Path | None = None
        self.engine = arguments.engine or ("embedded" if self.is_rehearsal else "vllm")
        self.name = f"two-{time.strftime('%H%M%S')}"
        self.run_dir = self.work / "runs" / self.name
        self.dtype = "float32" if self.is_rehearsal else "bfloat16"

    def make_world(self, facts: dict[str, Any]) -> None:
        """Prompts, and a model whose bytes count."""
        self.world = make_world(self.work, is_rehearsal=self.is_rehearsal)
        if self.is_rehearsal:
            self.model = self.world.model
        else:
            self.model = make_dense_model(self.work / "dense", tokenizer=self.world.model)
        facts["model_mib"] = round(sum(file.stat().st_size for file in self.model.glob("*.safetensors")) / 2**20)

    def settings(self) -> dict[str, Any]:
        """Settings of the run: four groups of eight long answers in a step, generation two versions ahead."""
        small, world = self.is_rehearsal, self.world
        assert world is not None, "the part `world` failed"
        own: dict[str, Any] = {
            "run.dir": self.work / "runs",
            "run.name": self.name,
            "actor.model_name_or_path": self.model,
            "actor.dtype": self.dtype,
            "actor.implementation": "hf",
            "actor.learning_rate": 3e-3 if small else 3e-4,
            "data.prompt_dataset": world.prompts,
            "data.max_len": 160 if small else 512,
            "train.agent_path": ROOT / "tools" / "device" / "even_agent.py",
            "train.num_steps": self.arguments.steps,
            "train.batch_size": 8 if small else 32,
            "train.micro_batch_tokens": 512 if small else 8192,
            "train.async_queue_size": 2,
            "train.partial_rollout_enable": True,
            "train.deterministic": not small,
            "rollout.batch_size": 2 if small else 4,
            "rollout.n_samples_per_prompt": 4 if small else 8,
            "rollout.max_new_tokens": 96 if small else 384,
            "rollout.max_concurrency": 256,
            "rollout.num_tries": 4,
            "algo.advantage.estimator": "grpo",
            "algo.advantage.is_correction_level": "token",
            "algo.advantage.is_correction_mode": "trunc",
            "ckpt.export": False,
            "vllm.engine": self.engine,
            "vllm.refit_timeout_s": 60,
            "placement.trainer": "apart",
        }
        if not small:
            own |= {"vllm.weight_transfer": "nccl", "vllm.enforce_eager": True, "vllm.kv_cache_space_gib": 16}
            own |= {"vllm.gpu_memory_utilization": 0.5, "vllm.max_num_seqs": 128}
        return own

    def train(self, facts: dict[str, Any]) -> None:
        """The run; when most of its steps are made, the engine's process is killed with answers in flight."""
        child = Child(molt("train", *flags(self.settings())), log=self.parts.logs / "two-train.log")
        limit_s = self.parts.left_s - (20 if self.is_rehearsal else 110)
        kill_at = self.arguments.steps - 4
        if not self.arguments.no_kill and wait_until(
            lambda: len(steps_of(self.run_dir)) >= kill_at or child.process.poll() is not None, limit_s
        ):
            facts["killed"] = Killer(child).kill_engine(is_core=self.engine == "vllm")
        facts["exit_code"] = child.wait(limit_s - (time.monotonic() - child.began))
        facts |= {"num_steps": len(steps_of(self.run_dir)), "wall_s": round(time.monotonic() - child.began, 1)}
        if steps := steps_of(self.run_dir)[2:]:
            whole = sum(step["train_s"] + step["wait_s"] for step in steps)
            facts["seconds_of_steps"] = {key: statistics.fmean(step[key] for step in steps) for key in ("train_s", "wait_s", "log_s")}
            facts["log_share"] = sum(step["log_s"] for step in steps) / whole
        failed = [body["reason"] for body in events_of(self.run_dir, "rollout_failed")]
        facts["failed"] = {reason: failed.count(reason) for reason in set(failed)}
        facts["refits_failed"] = [body["error"][:200] for body in events_of(self.run_dir, "refit_failed")]
        if facts["exit_code"] != 0:
            raise RuntimeError(f"molt train ended with {facts['exit_code']}: {child.tail()}")

    def refits(self, facts: dict[str, Any]) -> None:
        """Bytes, seconds and GB/s of every refit; one to other engines than before makes a new group and counts apart."""
        events = events_of(self.run_dir, "weights_refit")
        engines = [sorted(json.loads(body["engines"])) for body in events]
        rates = [body["size_bytes"] / body["transfer_s"] / 1e9 for body in events]
        known = [rate for number, rate in enumerate(rates) if number and engines[number] == engines[number - 1]]
        facts |= {
            "size_mib": round(events[0]["size_bytes"] / 2**20, 1),
            "num": len(events),
            "gb_per_s": {"median": statistics.median(known), "best": max(known), "worst": min(known), "first": rates[0]},
            "groups": [names for number, names in enumerate(engines) if not number or names != engines[number - 1]],
            "all": [
                [
                    body["policy_version"],
                    *(round(1e3 * body[key], 1) for key in ("pause_s", "transfer_s", "verify_s", "resume_s")),
                    body["num_in_flight"],
                    sorted(json.loads(body["engines"])),
                ]
                for body in events
            ],
            "columns": ["version", "pause_ms", "transfer_ms", "verify_ms", "resume_ms", "num_in_flight", "engines"],
        }

    def lineage(self, facts: dict[str, Any]) -> None:
        """Versions inside segments against the digests that engines and trainer gave for them."""
        from molt.log.reader import LogReader

        rows = LogReader.open(self.run_dir).cut().table("segments", ["segment_id", "spans", "version_min", "version_max"]).to_pylist()
        mixed = [row for row in rows if row["version_min"] is not None and row["version_min"] < row["version_max"]]
        used = {span["policy_version"] for row in rows for span in row["spans"] if span["source"] == "policy"}
        refits = {body["policy_version"]: body for body in events_of(self.run_dir, "weights_refit")}
        trained = {body["step"] + 1: body["weights_digest"] for body in events_of(self.run_dir, "step_trained")}
        wrong = [v for v in used if v not in refits or set(json.loads(refits[v]["engines"]).values()) != {refits[v]["weights_digest"]}]
        other = [v for v in used & set(trained) if refits[v]["weights_digest"] != trained[v]]
        facts |= {
            "num_segments": len(rows),
            "num_mixed": len(mixed),
            "versions_in_one": max((row["version_max"] - row["version_min"] + 1 for row in mixed), default=1),
            "num_versions_used": len(used),
            "versions_without_equal_engines": wrong,
            "versions_unlike_the_trainer": other,
        }
        if wrong or other:
            raise AssertionError(f"digests differ: engines {wrong}, trainer {other}")
        if len(mixed) < (10 if self.is_rehearsal else 100):
            raise AssertionError(f"only {len(mixed)} segments carry several versions")

    def audit(self, facts: dict[str, Any]) -> None:
        """Every invariant of the run."""
        child = Child(molt("audit", str(self.run_dir)), log=self.parts.logs / "two-audit.log")
        facts["exit_code"] = child.wait(60)
        if facts["exit_code"] != 0:
            raise RuntimeError(child.tail())

    async def train_again(self, facts: dict[str, Any], *, num_ranks: int) -> None:
        """The first recorded steps by so many ranks on a copy of the log. One rank also leaves its weights of each version."""
        from molt.admission.plan import plan_step
        from molt.cli.programs import load_program
        from molt.config import Config
        from molt.driver.house import ray_session
        from molt.learn.ranks import RankGroup
        from molt.log.actor import start_log_actor, stop_log_actor
        from molt.log.reader import LogReader

        copy = self.work / "copies" / f"{self.name}-{num_ranks}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.run_dir / "log", copy / "log")
        record = load_program("replay").read_record(LogReader.open(copy))
        flat = record["config"].model_dump()
        flat["fsdp"]["num_ranks"], flat["vllm"]["weight_transfer"] = num_ranks, "file"
        config = Config.model_validate(flat)
        found = []
        with ray_session(config):
            log = start_log_actor(copy, run=self.name, attempt=8, store=config.log.store)
            ranks = await RankGroup.start(config, run_dir=copy, run=self.name, attempt=8, log=log, num_steps=record["num_steps"])
            facts["devices"] = ranks.devices
            try:
                for old, recorded in record["plans"][:NUM_AGAIN]:
                    plan = plan_step(
                        list(old.segments),
                        step=old.step,
                        policy_version=old.policy_version,
                        seed=old.seed,
                        num_ranks=num_ranks,
                        micro_batch_tokens=config.train.micro_batch_tokens,
                        cursor=old.cursor,
                    )
                    result = await ranks.train(plan)
                    known = {"loss": result.loss, "grad_norm": result.grad_norm, "n_kept": result.n_kept, "batch": result.batch_digest}
                    found.append(
                        {**known, "train_s": result.train_s, "is_as_recorded": result.weights_digest == recorded["weights_digest"]}
                    )
                    if num_ranks == 1:
                        source = await ranks.publish_weights(plan.step + 1)
                        shutil.copy(str(source.path), self._weights(plan.step + 1))
            finally:
                await ranks.stop()
                stop_log_actor(log)
        facts["steps"] = found

    def _weights(self, version: int) -> Path:
        return self.work / "copies" / f"{self.name}-version-{version}.safetensors"

    def ranks_agree(self, facts: dict[str, Any]) -> None:
        """Two ranks against one on the same rows."""
        one, two = self.parts.facts["one_rank"]["steps"], self.parts.facts["two_ranks"]["steps"]
        tolerance = TOLERANCE[self.dtype]
        facts |= {
            "tolerance": tolerance,
            "is_same_batch": all(a["batch"] == b["batch"] for a, b in zip(one, two, strict=True)),
            "loss_apart": [abs(a["loss"] - b["loss"]) for a, b in zip(one, two, strict=True)],
            "grad_norm_apart": [abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(one, two, strict=True)],
            "n_kept_apart": [a["n_kept"] - b["n_kept"] for a, b in zip(one, two, strict=True)],
            "one_is_as_recorded": [step["is_as_recorded"] for step in one],
        }
        if not facts["is_same_batch"]:
            raise AssertionError("one rank and two trained different batches")
        if max(facts["loss_apart"]) > tolerance["loss"] or max(facts["grad_norm_apart"]) > tolerance["grad_norm"]:
            raise AssertionError(f"two ranks and one differ by more than {tolerance}")

    def rescore(self, facts: dict[str, Any]) -> None:
        """Log-probs of tokens under the weights of the version that they are tagged with, and under the neighbour's."""
        from molt.log.reader import LogReader

        columns = ["segment_id", "token_ids", "behaviour_logprobs", "spans", "version_min", "version_max"]
        rows = LogReader.open(self.run_dir).cut().table("segments", columns).to_pylist()
        known = range(1, NUM_AGAIN + 1)
        pairs = [(row, version) for row in rows for version in known[:-1] if {version, version + 1} <= set(_versions(row))]
        gaps = [found for row, version in pairs[:NUM_RESCORED] for found in self._gaps(row, version)]
        if not gaps:
            raise AssertionError(f"no segment changes between versions {known[0]} and {known[-1]}")
        facts |= {
            "num_segments": len(pairs[:NUM_RESCORED]),
            "num_tokens": sum(gap["num_tokens"] for gap in gaps),
            "own": statistics.fmean(gap["own"] for gap in gaps),
            "neighbour": statistics.fmean(gap["neighbour"] for gap in gaps),
            "num_nearer_to_own": sum(gap["own"] < gap["neighbour"] for gap in gaps),
            "num_compared": len(gaps),
            "all": gaps,
        }
        if facts["num_nearer_to_own"] < len(gaps):
            raise AssertionError(f"{len(gaps) - facts['num_nearer_to_own']} stretches are nearer to the neighbour version")

    def _gaps(self, row: dict[str, Any], version: int) -> list[dict[str, Any]]:
        """Of each of two neighbouring versions in a segment: mean |engine - own weights| and |engine - the other's weights|, nats."""
        versions = np.array(_versions(row))
        engine = np.array([np.nan if value is None else value for value in row["behaviour_logprobs"]])
        scored = {number: self._logprobs(number, row["token_ids"]) for number in (version, version + 1)}
        found = []
        for own, other in ((version, version + 1), (version + 1, version)):
            mask = versions == own
            if mask.sum() >= 8:
                near, far = (float(np.abs(engine - scored[number])[mask].mean()) for number in (own, other))
                found.append({"version": own, "num_tokens": int(mask.sum()), "own": near, "neighbour": far})
        return found

    def _logprobs(self, version: int, ids: list[int]) -> np.ndarray:
        """(T,) log-probs of a row's tokens under the weights of a version; NaN for the first."""
        import torch
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        if not hasattr(self, "_models"):
            self._models: dict[int, Any] = {}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if version not in self._models:
            model = AutoModelForCausalLM.from_pretrained(str(self.model), dtype=getattr(torch, self.dtype))
            missing, extra = model.load_state_dict(load_file(str(self._weights(version))), strict=False)
            assert not extra and set(missing) <= {"lm_head.weight"}, f"version {version}: missing {missing}, extra {extra}"
            self._models[version] = model.to(device).eval()
        with torch.no_grad():
            row = torch.tensor([ids], device=device)
            logits = self._models[version](row).logits[0, :-1].float()
            chosen = torch.log_softmax(logits, dim=-1).gather(1, row[0, 1:, None])[:, 0].cpu().numpy()
        return np.concatenate([[np.nan], chosen])


def _versions(row: dict[str, Any]) -> list[int]:
    """Version of each token of a segment; -1 where it was not sampled."""
    return [span["policy_version"] if span["source"] == "policy" else -1 for span in row["spans"] for _ in range(span["len"])]


if __name__ == "__main__":
    raise SystemExit(main())
