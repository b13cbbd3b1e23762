"""Settings: one typed tree, every key refused unless it is known, with Molt's published dotted names."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Room(BaseModel):
    """A group of settings: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RunSettings(Room):
    """Where the run lives and how it is named."""

    dir: str = "runs"
    """Folder that holds the runs."""
    name: str | None = None
    """Name of the run; a used name is refused. Made from agent, model and a short id when absent."""
    seed: int = 0


class ActorSettings(Room):
    """The policy that learns."""

    model_name_or_path: str | None = None
    """Folder with a Hugging Face model and its tokenizer, or OWNER/MODEL[@REVISION] of the Hub, which is fetched before anything starts."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    learning_rate: float = Field(1e-6, gt=0)
    min_learning_rate: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    """Steps in which the learning rate rises to actor.learning_rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: float = Field(0.0, ge=0)
    adam_betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = Field(1.0, gt=0)
    gradient_checkpointing: bool = False
    freeze_moe_router: bool = False
    freeze_vision: bool = True
    """Of a model that takes images: its vision tower and connector stay as loaded."""
    moe_router_dtype: Literal["auto", "float32"] = "auto"
    """float32: routers keep their weights and logits in float32 where the layers compute in actor.dtype=bfloat16."""
    implementation: Literal["auto", "hf", "automodel"] = "auto"
    """Model seam: auto takes NeMo AutoModel where it is installed with CUDA, else Hugging Face."""


class CriticSettings(Room):
    """The value model, for the gae estimator only."""

    model_name_or_path: str | None = None
    """Folder of the model to start from; the actor's when absent."""
    learning_rate: float = Field(5e-6, gt=0)
    value_clip: float = Field(0.2, gt=0)
    warmup_steps: int = Field(0, ge=0)
    """Steps in which only the critic learns; the actor is frozen."""


class ReferenceSettings(Room):
    """The frozen model for a KL term, or the teacher of on_policy_distill."""

    model_name_or_path: str | None = None
    """Folder of the frozen model; the initial actor when absent and a KL term is on."""
    offload: bool = False
    """Keep its weights on the host between uses (on a GPU)."""
    placement: Literal["colocated", "apart"] = "colocated"
    """colocated: in the trainer ranks, sharded with them; apart: in as many processes of its own."""


class DataSettings(Room):
    """The prompts."""

    prompt_dataset: str | None = None
    """JSONL or Parquet file, or a Hugging Face data set folder."""
    eval_dataset: str | None = None
    input_key: str = "input"
    label_key: str = "label"
    messages_key: str = "messages"
    images_key: str = "images"
    """Column of images; `<image>` in a text of the row, or an image part without a source, stands for the next one."""
    max_images: int = Field(8, gt=0)
    """Most images in the chat of one rollout."""
    max_image_pixels: int = Field(1 << 24, gt=0)
    """Most pixels of one image."""
    max_len: int = Field(4096, gt=1)
    """Longest segment in tokens; a rollout that reaches it is truncated."""
    apply_chat_template: bool = True
    system_prompt: str | None = None
    skip_malformed: bool = False
    """Count and skip malformed lines instead of refusing the file."""


class RolloutSettings(Room):
    """What is sampled, and how."""

    batch_size: int = Field(8, gt=0)
    """Prompt groups per policy version."""
    n_samples_per_prompt: int = Field(1, gt=0)
    """Rollouts in a group."""
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_new_tokens: int = Field(256, gt=0)
    """Longest single model call in tokens."""
    max_turns: int = Field(8, gt=0)
    timeout_s: float = Field(300.0, gt=0)
    """Longest rollout in seconds, agent code and model calls together."""
    num_workers: int = Field(1, gt=0)
    """Rollout worker processes that run agents."""
    num_tries: int = Field(2, gt=0)
    """Tries for a member whose rollout failed by no fault of the model."""
    max_concurrency: int = Field(64, gt=0)
    """Rollouts in flight per worker."""


class VllmSettings(Room):
    """The engines."""

    engine: Literal["auto", "vllm", "embedded"] = "auto"
    """auto: vllm where it is installed, else the embedded torch engine."""
    num_engines: int = Field(1, gt=0)
    tensor_parallel_size: int = Field(1, gt=0)
    data_parallel_size: int = Field(1, gt=0)
    enable_expert_parallel: bool = False
    """Whole experts on each GPU of an engine, in place of a part of every expert."""
    gpu_memory_utilization: float = Field(0.6, gt=0, le=1)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: the actor's."""
    max_num_seqs: int = Field(256, gt=0)
    seed_calls: bool = False
    """Each call draws by a seed of its own, whatever runs beside it; else all draw from one generator of the engine."""
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    compile: bool = True
    """On a GPU; false keeps CUDA graphs of decoding without torch's compiler, so that an engine starts a minute sooner."""
    kv_cache_space_gib: float | None = Field(None, gt=0)
    """Cache of an engine; when absent 1 on the CPU, and on a GPU what vllm.gpu_memory_utilization leaves."""
    num_speculative_tokens: int = Field(0, ge=0)
    """Tokens that the model's MTP head drafts at a step; 0 is off. The head stays as loaded: as the policy moves, it guesses worse."""
    sleep_level: Literal[0, 1, 2] = 0
    """Sleep while the trainer steps on the same GPU; 0 is off."""
    start_timeout_s: float = Field(600.0, gt=0)
    request_timeout_s: float = Field(300.0, gt=0)
    refit_timeout_s: float = Field(300.0, gt=0)
    weight_transfer: Literal["file", "ipc", "nccl"] = "file"
    """How new weights reach engines: a file in shared memory; CUDA handles on the same GPU; a broadcast to other GPUs."""
    kv_on_refit: Literal["keep", "recompute"] = "recompute"
    """keep: cache entries of in-flight requests stay from the old weights; recompute: they are made again."""


class TrainSettings(Room):
    """The loop."""

    agent_path: str | None = None
    """Python file that exports AgentRunner."""
    batch_size: int = Field(8, gt=0)
    """Rollouts per optimizer step."""
    num_steps: int | None = Field(None, gt=0)
    """Optimizer steps; by num_epochs when absent."""
    num_epochs: int = Field(1, gt=0)
    micro_batch_tokens: int = Field(4096, gt=0)
    """Most tokens in one packed micro-batch; at least data.max_len is needed."""
    async_queue_size: int = Field(1, ge=0)
    """Policy versions that generation may run ahead; 0 is strictly on-policy."""
    partial_rollout_enable: bool = False
    """Refit in the middle of generation instead of waiting for in-flight requests."""
    routing_replay: bool = False
    deterministic: bool = False
    """Deterministic kernels on the GPU; the CPU always is. With fsdp.attn_implementation=te their memory grows with the cube of
    train.micro_batch_tokens."""
    step_timeout_s: float = Field(1800.0, gt=0)
    """Longest wait for one batch or one step, or for the next group of an evaluation; past it the run stops and names the suspect."""
    weights_digest_interval: int = Field(1, ge=0)
    """Steps between digests of the weights; 0 is never. A step whose weights go to engines costs nothing more: both take the same."""
    epochs_per_batch: int = Field(1, gt=0)
    """Optimizer passes over one batch."""


class AdvantageSettings(Room):
    """Estimator and importance correction."""

    estimator: str = "reinforce"
    gamma: float = Field(1.0, ge=0, le=1)
    lambd: float = Field(1.0, ge=0, le=1)
    whiten: bool | None = None
    """Whiten advantages over the batch; by the estimator when absent."""
    is_correction_level: Literal["off", "token", "seq", "geo"] = "off"
    """Where settings are resolved and none is given: token under train.async_queue_size > 0, as batches then mix versions."""
    is_correction_mode: Literal["mask", "clip", "trunc"] = "mask"
    is_correction_threshold: tuple[float | None, float | None] = (None, None)
    """Band (low, high) of the ratio; by level and mode when absent."""
    gate: Literal["ratio", "kl", "tv"] = "ratio"
    """What the band bounds: importance ratio, binary KL, or total variation."""
    decoupled: bool = False
    """Correct staleness and kernel mismatch apart, by the version stored per token."""
    is_mismatch_threshold: tuple[float | None, float | None] = (None, None)
    """Band of kernel mismatch under decoupled; by level and mode when absent."""


class KlSettings(Room):
    """Divergence from the reference."""

    coef: float = Field(0.0, ge=0)
    estimator: Literal["k1", "k2", "k3"] = "k3"
    use: Literal["loss", "reward"] = "loss"
    target: float | None = None
    """Target divergence of the adaptive controller, nats; fixed coefficient when absent."""
    horizon: int = Field(10000, gt=0)


class LossSettings(Room):
    """The surrogate and its aggregation."""

    name: str = "ppo"
    clip_low: float = Field(0.2, ge=0)
    clip_high: float = Field(0.2, ge=0)
    dual_clip: float | None = None
    aggregation: Literal["token-mean", "seq-mean-token-mean", "prompt-mean-token-mean"] = "token-mean"
    entropy_coef: float = 0.0


class RewardSettings(Room):
    """Shaping and filtering of rewards."""

    clip: tuple[float, float] | None = None
    overlong_buffer: int = Field(0, ge=0)
    """Tokens before data.max_len in which a linear penalty grows to overlong_penalty; 0 is off."""
    overlong_penalty: float = Field(1.0, ge=0)
    stop_properly_penalty: float | None = None
    """Factor on the reward of a truncated rollout where it is above 0; off when absent."""
    filter_range: tuple[float, float] | None = None
    """Dynamic filtering: keep groups whose mean outcome lies strictly inside."""


class AlgoSettings(Room):
    """The algorithm."""

    advantage: AdvantageSettings = AdvantageSettings()
    kl: KlSettings = KlSettings()
    loss: LossSettings = LossSettings()
    reward: RewardSettings = RewardSettings()


class FsdpSettings(Room):
    """How the policy is spread."""

    num_ranks: int = Field(1, gt=0)
    """Trainer ranks, a GPU each: replicas x shards x cp_size x tp_size."""
    tp_size: int = Field(1, gt=0)
    """Ranks that share every layer of the same tokens."""
    ep_size: int = Field(1, gt=0)
    """Ranks that share the experts; each has other tokens."""
    cp_size: int = Field(1, gt=0)
    """Ranks that share the tokens of the same rows."""
    replicas: int = Field(1, gt=0)
    """Copies of the sharded weights; ranks of one copy are best on one host."""
    offload: Literal["none", "optimizer", "full"] = "none"
    attn_implementation: Literal["sdpa", "eager", "te", "flash_attention_2", "flex"] = "sdpa"
    packing_check: bool = True
    """Ask the model at the start whether rows that are packed together see each other, and refuse it if they do."""
    reshard_after_forward: bool = True
    """Give back whole weights after each block's forward and backward pass; false gathers them once for all micro-batches that a step
    learns from, and holds them meanwhile. Passes that only score give them back as before."""
    defer_grad_sync: bool = False
    """Sum gradients over ranks after the last micro-batch of a step, in place of after each; until then each rank holds all of them."""

    @property
    def group_size(self) -> int:
        """Ranks that read the same rows."""
        return self.tp_size * self.cp_size

    @property
    def num_shards(self) -> int:
        """Data shards: how many parts a step plan has."""
        return self.num_ranks // self.group_size


class PlacementSettings(Room):
    """Which processes share a GPU."""

    trainer: Literal["auto", "colocated", "apart"] = "auto"
    """colocated: trainer ranks and engines side by side on the same GPUs; apart: GPUs of their own; auto: apart where they suffice."""


class AdmissionSettings(Room):
    """Which groups may train."""

    max_lag: int | None = Field(None, ge=0)
    """Oldest admissible token in versions; train.async_queue_size when absent."""
    incomplete_groups: Literal["drop", "keep"] = "drop"
    max_dropped_groups: int = Field(256, gt=0)
    """Groups dropped in a row after which the run stops and names the last reason."""


class LogSettings(Room):
    """The trajectory log."""

    store: str = "durable"
    """Name of a profile in stores/, or the path of a TOML file."""
    seal: bool = True


class CkptSettings(Room):
    """Checkpoints."""

    output_dir: str | None = None
    """Folder for the exported Hugging Face model at the end, new, empty or an earlier export; <run>/checkpoints/final when absent."""
    save_interval: int = Field(0, ge=0)
    """Steps between checkpoints; 0 is at the end only."""
    keep: int = Field(2, gt=0)
    export: bool = True


class EvalSettings(Room):
    """Evaluation in the loop."""

    interval: int = Field(0, ge=0)
    """Steps between evaluations; 0 is off."""
    n_samples_per_prompt: int = Field(1, gt=0)
    temperature: float = Field(1.0, ge=0)
    max_prompts: int | None = Field(None, gt=0)


class SftSettings(Room):
    """Supervised fine-tuning."""

    dataset: str | None = None
    last_turn_only: bool = False
    batch_size: int = Field(8, gt=0)
    """Conversations per optimizer step."""


class Config(Room):
    """Everything that one run is told."""

    run: RunSettings = RunSettings()
    actor: ActorSettings = ActorSettings()
    critic: CriticSettings = CriticSettings()
    reference: ReferenceSettings = ReferenceSettings()
    data: DataSettings = DataSettings()
    rollout: RolloutSettings = RolloutSettings()
    vllm: VllmSettings = VllmSettings()
    train: TrainSettings = TrainSettings()
    algo: AlgoSettings = AlgoSettings()
    fsdp: FsdpSettings = FsdpSettings()
    placement: PlacementSettings = PlacementSettings()
    admission: AdmissionSettings = AdmissionSettings()
    log: LogSettings = LogSettings()
    ckpt: CkptSettings = CkptSettings()
    eval: EvalSettings = EvalSettings()
    sft: SftSettings = SftSettings()

    @property
    def max_lag(self) -> int:
        """Oldest admissible token in policy versions."""
        return self.train.async_queue_size if self.admission.max_lag is None else self.admission.max_lag

    @property
    def groups_per_step(self) -> int:
        """Prompt groups per optimizer step."""
        return self.train.batch_size // self.rollout.n_samples_per_prompt
