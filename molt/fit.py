"""Does a run fit a cluster? Settings, shapes, places and memory together, from a config.json alone; no GPU and no weights are needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from molt.config import Config
from molt.errors import SettingError
from molt.layout_rules import model_findings
from molt.memory import CONTEXT_GIB, Bill, engine_bill, host_bill, loading_gib, loads_whole, trainer_bill
from molt.model_shape import ModelShape
from molt.placement import Layout, lay_out
from molt.settings import check

if TYPE_CHECKING:
    from molt.learn.meta import Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What is there."""

    num_gpus: int
    gpu_gib: float
    host_gib: float | None = None
    """Memory of one host; not looked at when unknown."""
    gpus_per_host: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The answer."""

    findings: tuple[str, ...]
    """Why it does not fit, each with the way out; empty when it does."""
    notes: tuple[str, ...]
    """What fits and yet deserves a look."""
    layout: Layout | None
    """Places; None where there are too few GPUs."""
    trainer: Bill
    engine: Bill
    host: Bill
    sequences: float
    """Of data.max_len that one engine's cache holds."""
    free_gib: dict[str, float]
    """Left on a trainer's GPU, an engine's and a host; below zero is too little. A shared GPU counts for both."""

    @property
    def is_fitting(self) -> bool:
        """Whether nothing stands against it."""
        return not self.findings


def fit(config: Config, cluster: Cluster, shape: ModelShape, parameters: Parameters) -> Fit:
    """Check a run against a cluster."""
    findings = list(_lines(lambda: check(config)))
    findings += model_findings(config, shape)
    has_frozen = config.algo.kl.coef > 0 and config.reference.placement == "apart"
    layout = None
    try:
        layout = lay_out(config, cluster.num_gpus, has_frozen=has_frozen)
    except SettingError as error:
        findings += str(error).splitlines()
    trainer = trainer_bill(config, shape, parameters)
    engine, sequences = engine_bill(config, shape, parameters, cluster.gpu_gib)
    host = host_bill(config, parameters, ranks_per_host=min(cluster.gpus_per_host, config.fsdp.num_ranks))
    free = _free(config, cluster, layout, trainer, engine, host)
    findings += _memory_findings(config, free, trainer, engine, host, cluster)
    if loads_whole(config, parameters) and (loading := loading_gib(config, parameters) + CONTEXT_GIB) > cluster.gpu_gib:
        findings.append(
            f"trainer: AutoModel reads the whole model in float32 before it is sharded, {loading:.1f} GiB on {cluster.gpu_gib:g} GiB; "
            "set actor.implementation=hf, which reads shards alone"
        )
    if sequences < 1:
        findings.append(
            f"the cache of an engine holds {sequences:.2f} sequences of data.max_len={config.data.max_len}; "
            "raise vllm.gpu_memory_utilization, vllm.kv_cache_space_gib or vllm.tensor_parallel_size"
        )
    return Fit(
        findings=tuple(findings),
        notes=tuple(_notes(config, cluster, layout, sequences)),
        layout=layout,
        trainer=trainer,
        engine=engine,
        host=host,
        sequences=sequences,
        free_gib=free,
    )


def _free(config: Config, cluster: Cluster, layout: Layout | None, trainer: Bill, engine: Bill, host: Bill) -> dict[str, float]:
    """What is left of each kind of place."""
    trainer_gib, engine_gib = trainer.gib, engine.gib
    if layout is not None and layout.is_colocated and layout.engines:
        if config.vllm.sleep_level:
            trainer_gib = engine_gib = max(trainer.gib, engine.gib)  # one sleeps while the other works
        else:
            per_gpu = -(-len(layout.engines) // len(layout.bundles))
            trainer_gib = engine_gib = trainer.gib + per_gpu * engine.gib
    free = {"trainer": cluster.gpu_gib - trainer_gib, "engine": cluster.gpu_gib - engine_gib}
    return free if cluster.host_gib is None else free | {"host": cluster.host_gib - host.gib}


def _memory_findings(config: Config, free: dict[str, float], trainer: Bill, engine: Bill, host: Bill, cluster: Cluster) -> list[str]:
    """What is too small, with the largest needs and the settings that lower them."""
    ways = {
        "trainer": _trainer_ways(config),
        "engine": "lower vllm.gpu_memory_utilization or vllm.kv_cache_space_gib, or raise vllm.tensor_parallel_size",
        "host": "put fewer ranks on a host, or more memory into it",
    }
    bills = {"trainer": trainer, "engine": engine, "host": host}
    found = []
    for place, left in free.items():
        if left < 0:
            most = sorted(bills[place].needs, key=lambda need: -need.gib)[:3]
            size = cluster.host_gib if place == "host" else cluster.gpu_gib
            named = ", ".join(f"{need.what} {need.gib:.1f}" for need in most)
            found.append(f"{place}: {-left:.1f} GiB too much for {size:g} GiB ({named}); {ways[place]}")
    return found


def _trainer_ways(config: Config) -> str:
    """What lowers a trainer's memory and is not set yet."""
    further = {
        "fsdp.reshard_after_forward": not config.fsdp.reshard_after_forward,
        "fsdp.defer_grad_sync=false": config.fsdp.defer_grad_sync,
        "actor.gradient_checkpointing": not config.actor.gradient_checkpointing,
        "fsdp.offload=optimizer": config.fsdp.offload == "none",
        "fsdp.offload=full": config.fsdp.offload == "optimizer",
    }
    ways = [f"set {name}" for name, helps in further.items() if helps]
    return ", ".join(["lower train.micro_batch_tokens", *ways]) + ", or take more ranks"


def _notes(config: Config, cluster: Cluster, layout: Layout | None, sequences: float) -> list[str]:
    """What slows a run down and does not stop it."""
    notes = []
    wanted = config.rollout.batch_size * config.rollout.n_samples_per_prompt * (1 + config.train.async_queue_size) / config.vllm.num_engines
    at_once = min(wanted, config.vllm.max_num_seqs)
    if 1 <= sequences < at_once:
        notes.append(
            f"an engine's cache holds {sequences:.0f} sequences of data.max_len={config.data.max_len}, up to {at_once:.0f} are in flight; "
            "shorter ones fit more often, longer ones are preempted"
        )
    if config.fsdp.tp_size > cluster.gpus_per_host:
        notes.append(f"fsdp.tp_size={config.fsdp.tp_size} crosses hosts of {cluster.gpus_per_host} GPUs; its collectives leave NVLink")
    if layout is not None and (used := sum(layout.bundles)) < cluster.num_gpus:
        notes.append(f"{cluster.num_gpus - used} of {cluster.num_gpus} GPUs are idle; raise fsdp.num_ranks or vllm.num_engines")
    return notes


def _lines(body: object) -> list[str]:
    """The findings of a check as lines."""
    assert callable(body), "a check is called"
    try:
        body()
    except SettingError as error:
        return str(error).splitlines()
    return []
