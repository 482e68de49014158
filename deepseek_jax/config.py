"""Configuration: frozen, typed, hashable; built once at the door and static under `jit`.

Values live in `configs/*.py` as `ml_collections.ConfigDict`, or in a released `config.json`. They
become the dataclasses below, and the ConfigDict is never seen again. Unknown keys, wrong types and
values the model cannot represent are errors that name the field.
"""

import dataclasses
import json

import ml_collections

from deepseek_jax.fields import build, require
from deepseek_jax.lora import LoraConfig
from deepseek_jax.model_config import ModelConfig


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
  """How the model is executed; nothing here changes what it computes beyond rounding.

  `quantize` lists the cache components whose fake quantisation is on (`main_kv`, `index`,
  `window_kv`). `row_chunk` is the number of query rows whose scores exist at one time. `kernels`
  is "auto" (Pallas kernels on a TPU, where they take the sizes), "pallas" or "reference".
  `spread_dense` spreads dense weights over a mesh, to be gathered layer by layer; without it every
  device has them, which suits serving. `stored_base` keeps frozen weights in FP8 and FP4 as
  released, decoded a layer at a time.
  """

  dtype: str = "float32"
  param_dtype: str = "float32"
  quantize: tuple[str, ...] = ()
  remat: str = "none"
  scan_layers: bool = True
  row_chunk: int = 128
  kernels: str = "auto"
  spread_dense: bool = True
  stored_base: bool = False

  def __post_init__(self):
    floats = "float32", "bfloat16"
    known = dict(dtype=floats, param_dtype=floats, remat=("none", "layer", "dots"))
    known["kernels"] = "auto", "pallas", "reference"
    for name, allowed in known.items():
      value = getattr(self, name)
      require(value in allowed, f"compute.{name}", value, f"one of {allowed}")
    allowed = ("main_kv", "index", "window_kv")
    for part in self.quantize:
      require(part in allowed, "compute.quantize", part, f"one of {allowed}")
    require(self.row_chunk >= 1, "compute.row_chunk", self.row_chunk, "at least 1")

  @property
  def implementation(self) -> str | None:
    """What `pallas_kernels.dispatch.resolve` takes."""
    return None if self.kernels == "auto" else self.kernels


_STORAGE = ("fp4_e2m1_e4m3_16", "mxfp4", "fp8_e4m3_e8m0_32", "bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class CacheFormats:
  """Storage format of each cached component: a block format, 'bfloat16' or 'float32' (spec 8.1)."""

  main_kv: str = "fp4_e2m1_e4m3_16"
  index: str = "mxfp4"
  window_kv: str = "fp8_e4m3_e8m0_32"

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      require(value in _STORAGE, f"serve.cache.{field.name}", value, f"one of {_STORAGE}")

  @classmethod
  def of(cls, compute: ComputeConfig) -> "CacheFormats":
    """What loses nothing: the released format where the model rounds to it, else its dtype."""
    keep = {
        f.name: compute.dtype for f in dataclasses.fields(cls) if f.name not in compute.quantize
    }
    return cls(**keep)


@dataclasses.dataclass(frozen=True)
class ServeConfig:
  """Reading, writing and keeping (report 3.2; spec 7). Lengths are in tokens.

  Attributes:
    cache: storage formats; None stores what the model rounds to, without further loss.
    buckets: lengths of the compiled prefill chunks, ascending. A prompt is read in chunks of the
      last and a rest in the smallest that holds it.
    block: tokens per stored block of global entries.
    guarantee_hours: no stored entry goes earlier after its last use.
    budget_bytes: of the persistent store.
    ttl_minutes: life of window entries in host memory.
    host_fraction: share of the host's memory for window entries.
  """

  cache: CacheFormats | None = None
  buckets: tuple[int, ...] = (32, 128, 512)
  block: int = 64
  guarantee_hours: float = 72.0
  budget_bytes: int = 1 << 34
  ttl_minutes: float = 5.0
  host_fraction: float = 0.1

  def __post_init__(self):
    rising = self.buckets and all(a < b for a, b in zip((0, *self.buckets), self.buckets))
    require(rising, "serve.buckets", self.buckets, "ascending lengths of at least 1")
    for name in ("block", "guarantee_hours", "budget_bytes", "ttl_minutes"):
      require(getattr(self, name) > 0, f"serve.{name}", getattr(self, name), "above 0")
    require(0 < self.host_fraction <= 1, "serve.host_fraction", self.host_fraction, "within (0, 1]")


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Conversations and tokenizer. `source`: 'chatterbot' or a JSONL file of messages."""

  source: str = "chatterbot"
  tokenizer: str = "bytes"
  eval_fraction: float = 0.05
  truncate: bool = False

  def __post_init__(self):
    require(0 <= self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "within [0, 1)")


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
  """Bounded replay simulated in training (spec 17): the decoder's in every turn.

  Attributes:
    decoder_len: rows of a decoder line; a turn takes its response and W rows before it.
    encoder: probability q that a turn comes back with its window entries lost.
    hits: where its global entries end: "turn", where the turn before ended, or "uniform".
  """

  decoder_len: int
  encoder: float = 0.0
  hits: str = "turn"

  def __post_init__(self):
    require(self.decoder_len >= 1, "train.replay.decoder_len", self.decoder_len, "at least 1")
    require(0 <= self.encoder <= 1, "train.replay.encoder", self.encoder, "within [0, 1]")
    kinds = ("turn", "uniform")
    require(self.hits in kinds, "train.replay.hits", self.hits, f"one of {kinds}")


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  """Training on responses that the model writes itself, as it is served (report 4; spec 14).

  A rollout is one response for every line of `updates` steps; each step then trains on its share.

  Attributes:
    objective: "distill": reverse KL to a teacher over the whole vocabulary; "grpo": rewards of
      exact answers.
    prompts: "data": prompts of `Config.data`, for distillation; "retrieval" or "arithmetic".
    prompt_len: tokens that a prompt has at most.
    max_new_tokens: of a response.
    temperature: of the samples.
    group: responses of one prompt, whose mean reward is the baseline.
    updates: steps a rollout.
    teacher: workdir of the teacher's checkpoint.
    clip: ε of the importance ratio, kept within [1 − ε, 1 + ε].
    efforts: levels b of which each group has one, named in the prompt.
    penalty: k0 of the length penalty min(penalty_max, k0 · exp(−(b − b_min)/penalty_decay) · ℓ/L),
      ℓ of L = max_new_tokens tokens.
    penalty_decay: τ, in levels.
    penalty_max: C_max.
  """

  objective: str
  prompts: str = "data"
  prompt_len: int = 64
  max_new_tokens: int = 16
  temperature: float = 1.0
  group: int = 1
  updates: int = 1
  teacher: str = ""
  clip: float = 0.2
  efforts: tuple[int, ...] = ()
  penalty: float = 0.0
  penalty_decay: float = 25.0
  penalty_max: float = 0.5

  def __post_init__(self):
    known = dict(objective=("distill", "grpo"), prompts=("data", "retrieval", "arithmetic"))
    for name, allowed in known.items():
      value = getattr(self, name)
      require(value in allowed, f"train.rollout.{name}", value, f"one of {allowed}")
    for name in ("prompt_len", "max_new_tokens", "group", "updates"):
      require(getattr(self, name) >= 1, f"train.rollout.{name}", getattr(self, name), "at least 1")
    for name in ("temperature", "penalty_decay"):
      require(getattr(self, name) > 0, f"train.rollout.{name}", getattr(self, name), "above 0")
    for name in ("clip", "penalty", "penalty_max"):
      require(getattr(self, name) >= 0, f"train.rollout.{name}", getattr(self, name), "at least 0")
    levels = all(1 <= b <= 100 for b in self.efforts)
    require(levels, "train.rollout.efforts", self.efforts, "levels within 1..100")
    if self.objective == "distill":
      require(self.teacher, "train.rollout.teacher", self.teacher, "the workdir of a checkpoint")
      plain = not self.efforts and not self.penalty
      told = (self.efforts, self.penalty)
      require(plain, "train.rollout.efforts, penalty", told, "() and 0 where nothing is rewarded")
    else:
      require(self.prompts != "data", "train.rollout.prompts", "data", "a task with a reward")
      require(self.group > 1, "train.rollout.group", self.group, "at least 2, for a baseline")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """One fine-tuning run (spec 14 for the optimiser's constants). Rates and speeds are per step.

  A step reads `accumulation` × `batch_size` packed rows of `seq_len` tokens. Parameters whose path
  a pattern of `frozen` finds are not trained; with adapters (`Config.lora`) they alone are, and
  what a pattern of `trainable` finds. `init` is the workdir of a checkpoint to start from, such as
  `convert_checkpoint.py` writes. With `replay` every turn sees what it would in serving; with
  `rollout` the responses are the model's own.
  """

  steps: int
  batch_size: int
  seq_len: int
  accumulation: int = 1
  seed: int = 0
  learning_rate: float = 2.6e-4
  schedule: str = "report"
  warmup_steps: int = 10
  final_learning_rate: float = 0.1
  weight_decay: float = 0.1
  clip_norm: float = 1.0
  engram_lr_scale: float = 5.0
  balance_loss: float = 1e-4
  router_bias_speed: float = 1e-3
  index_loss: str = "frozen"
  index_loss_weight: float = 1.0
  frozen: tuple[str, ...] = ()
  trainable: tuple[str, ...] = ()
  init: str = ""
  replay: ReplayConfig | None = None
  rollout: RolloutConfig | None = None
  checkpoint_every: int = 50
  keep_checkpoints: int = 2
  eval_every: int = 50
  sample_prompt: str = "Hello, who are you?"
  sample_tokens: int = 96

  def __post_init__(self):
    counts = "steps batch_size seq_len accumulation checkpoint_every keep_checkpoints eval_every"
    for name in counts.split():
      require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "at least 1")
    kinds = ("constant", "cosine", "report")
    require(self.schedule in kinds, "train.schedule", self.schedule, f"one of {kinds}")
    require(
        0 <= self.warmup_steps <= self.steps, "train.warmup_steps", self.warmup_steps,
        f"within 0..train.steps ({self.steps})",
    )  # fmt: skip
    stages = ("frozen", "warmup", "sparse")
    require(self.index_loss in stages, "train.index_loss", self.index_loss, f"one of {stages}")
    require(self.learning_rate > 0, "train.learning_rate", self.learning_rate, "above 0")
    require(self.clip_norm > 0, "train.clip_norm", self.clip_norm, "above 0")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Devices along each axis of the mesh; see `sharding`. Their product is the number of devices."""

  data: int = 1
  fsdp: int = 1
  expert: int = 1
  seq: int = 1

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      require(value >= 1, f"mesh.{field.name}", value, "at least 1")

  @property
  def devices(self) -> int:
    return self.data * self.fsdp * self.expert * self.seq


@dataclasses.dataclass(frozen=True)
class Config:
  """One experiment: what a `configs/*.py` file becomes."""

  model: ModelConfig
  compute: ComputeConfig = ComputeConfig()
  train: TrainConfig | None = None
  data: DataConfig = DataConfig()
  serve: ServeConfig = ServeConfig()
  mesh: MeshConfig = MeshConfig()
  lora: LoraConfig | None = None

  def __post_init__(self):
    mesh, model, train = self.mesh, self.model, self.train
    share = mesh.expert * mesh.seq
    require(
        model.n_routed_experts % share == 0, "mesh.expert × mesh.seq", share,
        f"a divisor of n_routed_experts ({model.n_routed_experts})",
    )  # fmt: skip
    if train is not None:
      lines = mesh.data * mesh.fsdp * mesh.expert
      require(
          train.batch_size % lines == 0, "train.batch_size", train.batch_size,
          f"a multiple of mesh.data × mesh.fsdp × mesh.expert ({lines})",
      )  # fmt: skip
      unit = mesh.seq * max(1, *model.compress_ratios)
      require(
          mesh.seq == 1 or train.seq_len % unit == 0, "train.seq_len", train.seq_len,
          f"a multiple of mesh.seq × the largest ratio ({unit})",
      )  # fmt: skip
      if train.replay is not None:
        rows, w = train.replay.decoder_len, model.sliding_window
        require(
            rows > w and rows % mesh.seq == 0, "train.replay.decoder_len", rows,
            f"more than sliding_window ({w}), which comes before a response, and a multiple of"
            f" mesh.seq ({mesh.seq})",
        )  # fmt: skip
      if train.rollout is not None:
        self._check_rollout(train, train.rollout)

  def _check_rollout(self, train: TrainConfig, r: RolloutConfig) -> None:
    """Whatever is written must fit into the lines that train on it."""
    seq = self.mesh.seq
    require(seq == 1, "mesh.seq", seq, "1 with train.rollout; serving does not divide rows")
    again = 2 if train.replay and train.replay.encoder else 1
    most, w = again * (r.prompt_len + r.max_new_tokens), self.model.sliding_window
    require(train.seq_len >= most, "train.seq_len", train.seq_len, f"at least {most} for rollouts")
    if train.replay is not None:
      most = min(w, r.prompt_len) + r.max_new_tokens
      rows = train.replay.decoder_len
      require(rows >= most, "train.replay.decoder_len", rows, f"at least {most} for rollouts")
    lines = train.batch_size * train.accumulation * r.updates
    require(
        lines % r.group == 0, "train.rollout.group", r.group,
        f"a divisor of the {lines} lines of a rollout",
    )  # fmt: skip

  @classmethod
  def from_config_dict(cls, config: ml_collections.ConfigDict) -> "Config":
    """From the ConfigDict of a config file; the door through which every configuration comes."""
    return build(cls, config.to_dict())

  def to_json(self) -> str:
    """Stable text form: what a workdir remembers of the experiment that filled it."""
    return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)
