"""Batches of the model's own responses, and what is remembered of how they came about."""

import base64
import functools
import hashlib
import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from deepseek_jax import tokenizer as tok
from deepseek_jax.checkpoint.stored_checkpoint import load_model
from deepseek_jax.config import Config
from deepseek_jax.nn.transformer import Routes, Transformer
from deepseek_jax.schedule import Schedule
from deepseek_jax.train import rollouts, tasks
from deepseek_jax.train.conversations import Example
from deepseek_jax.train.data import Batch, PackedBatch, Policy, collate
from deepseek_jax.train.tasks import Prompt
from deepseek_jax.train.turns import Turn, Views, drawn


class Rollout(NamedTuple):
  """One conversation a line, as arrays that a checkpoint can hold.

  Attributes:
    prompts, lengths: tokens [R, P] and how many of them are there.
    hits: tokens whose entries were found; 0 for a cold prefill.
    responses, logprobs: [R, n].
    written: tokens of each response.
    rewards, advantages: [R].
    encoder, decoder: experts of the rows of both stacks in the order of the batch's, [R, layers, T,
      X].
  """

  prompts: np.ndarray
  lengths: np.ndarray
  hits: np.ndarray
  responses: np.ndarray
  logprobs: np.ndarray
  written: np.ndarray
  rewards: np.ndarray
  advantages: np.ndarray
  encoder: np.ndarray
  decoder: np.ndarray


class OnPolicy:
  """An iterator of batches that are written as they are needed.

  Its state is a number of steps, and the rollout that a step stopped in the middle of.

  Args:
    config: with `train.rollout`.
    tokenizer: of prompts and responses.
    graphdef: of the model.
    examples: conversations to take prompts from.
    mesh: of the parameters; None for one device.
    reward: of a response and the right answer.
  """

  def __init__(
      self, config: Config, tokenizer: tok.Tokenizer, graphdef: nnx.GraphDef,
      examples: Sequence[Example] = (), *, mesh: Mesh | None = None,
      reward: Callable[[str, str], float] = tasks.exact_match,
  ):  # fmt: skip
    self._config, self._tokenizer, self._graphdef = config, tokenizer, graphdef
    self._reward, self._how, self._mesh = reward, config.train.rollout, mesh
    model, t = config.model, config.train
    self._classes = tok.token_classes(tokenizer) if model.engram_layer_ids else None
    self._pad_class = 0 if self._classes is None else int(self._classes[tokenizer.pad_id])
    self._multiple = int(np.lcm.reduce(Schedule.from_config(model).ratios))
    self._prompts = None
    if self._how.prompts == "data":
      self._prompts = tasks.data_prompts(examples, self._how.prompt_len)
    self._lines = t.batch_size * t.accumulation * self._how.updates
    self._params: nnx.State | None = None
    self._step, self._rollout, self._batches = 0, None, None

  @property
  def metrics(self) -> dict[str, float]:
    """Of the rollout of the newest batch: mean reward, mean length in tokens, share of hits."""
    r = self._rollout
    found = {"response_tokens": r.written.mean(), "hits": (r.hits > 0).mean()}
    if self._how.objective == "grpo":
      found["reward"] = r.rewards.mean()
    return {name: float(value) for name, value in found.items()}

  def see(self, params: nnx.State) -> None:
    """The parameters that the next rollout is written with."""
    self._params = params

  def __iter__(self) -> "OnPolicy":
    return self

  def __next__(self) -> PackedBatch:
    number, share = divmod(self._step, self._how.updates)
    if share == 0:
      self._rollout, self._batches = self._write(number), None
    if self._batches is None:
      self._batches = self._collated(self._rollout)
    self._step += 1
    batch = jax.tree.map(lambda a: a[share], self._batches)
    return PackedBatch(batch, [])

  def get_state(self) -> dict[str, Any]:
    """JSON-able: `step`, and `rollout` where a step has been taken on a part of it."""
    state: dict[str, Any] = {"step": self._step, "data": self._digest}
    if self._step % self._how.updates:
      file = io.BytesIO()
      np.savez_compressed(file, **self._rollout._asdict())
      state["rollout"] = base64.b64encode(file.getvalue()).decode()
    return state

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues from `state`; a ValueError if it comes from other prompts."""
    if state["data"] != self._digest:
      raise ValueError(
          f"iterator state: data {state['data']} is not {self._digest} of this run; it must have"
          " the same rollout configuration, seed, lines and prompts"
      )
    self._step, self._rollout, self._batches = state["step"], None, None
    if "rollout" in state:
      with np.load(io.BytesIO(base64.b64decode(state["rollout"]))) as file:
        self._rollout = Rollout(**file)

  @functools.cached_property
  def _digest(self) -> str:
    t = self._config.train
    digest = hashlib.sha256(f"{t.rollout} {t.replay} {t.seed} {self._lines}".encode())
    for prompt in self._prompts or ():
      digest.update(prompt.tokens.tobytes())
    return digest.hexdigest()[:16]

  def _drawn_prompts(self, number: int) -> list[Prompt]:
    """Of rollout `number`: every group answers one prompt."""
    rng = np.random.Generator(np.random.PCG64([self._config.train.seed, number]))
    how, found = self._how, []
    groups = self._lines // how.group
    for i in range(number * groups, (number + 1) * groups):
      if self._prompts is not None:
        prompt = self._prompts[int(rng.integers(len(self._prompts)))]
      else:
        effort = how.efforts[i % len(how.efforts)] if how.efforts else None
        prompt = tasks.task_prompt(self._tokenizer, how.prompts, rng, effort)
      if len(prompt.tokens) > how.prompt_len:
        raise ValueError(
            f"a prompt of {how.prompts} has {len(prompt.tokens)} tokens; train.rollout.prompt_len"
            f" is {how.prompt_len}"
        )
      found += [prompt] * how.group
    return found

  def _hit(self, prompt: Prompt, number: int, line: int) -> int:
    replay = self._config.train.replay
    if replay is None:
      return 0
    turns = [Turn(prompt.before, prompt.before), Turn(len(prompt.tokens), len(prompt.tokens))]
    seed = self._config.train.seed, number, line
    window = self._config.model.sliding_window
    return drawn(turns, replay, window=window, multiple=self._multiple, seed=seed)[1].hit

  def _write(self, number: int) -> Rollout:
    """Rollout `number` with the parameters at hand."""
    config, how = self._config, self._how
    model, replay = nnx.merge(self._graphdef, self._params), config.train.replay
    window, order = config.model.sliding_window, config.model.engram_max_ngram_size
    prompts = self._drawn_prompts(number)
    hits = [self._hit(prompt, number, line) for line, prompt in enumerate(prompts)]
    texts = [prompt.tokens for prompt in prompts]
    plans = [
        rollouts.plan_of(len(text), hit, window, narrowed=replay is not None)
        for text, hit in zip(texts, hits)
    ]
    parts, floors = rollouts.parts_of(
        texts, plans, longest=how.prompt_len, window=window, classes=self._classes,
        pad_class=self._pad_class, order=order, replays=bool(replay and replay.encoder),
    )  # fmt: skip
    most = how.prompt_len + how.max_new_tokens
    cache = rollouts.empty_cache(model, len(texts), most, self._pad_class)
    found = jax.device_get(
        rollouts.write(
            model, cache, parts, floors, self._classes, (config.train.seed, number),
            new=how.max_new_tokens, temperature=how.temperature, stop=self._tokenizer.eos_id,
            mesh=self._mesh,
        )
    )  # fmt: skip
    return self._remembered(prompts, plans, parts, found)

  def _remembered(self, prompts, plans, parts, found: rollouts.Written) -> Rollout:
    how, stop = self._how, self._tokenizer.eos_id
    written = found.live.sum(axis=1)
    rewards = advantages = np.zeros(len(prompts), np.float32)
    if how.objective == "grpo":
      tokens = [row[:n] for row, n in zip(found.tokens, written)]
      texts = [self._tokenizer.decode(row[row != stop]) for row in tokens]
      rewards, advantages = tasks.advantages(how, texts, written, prompts, self._reward)
    lengths = np.array([len(prompt.tokens) for prompt in prompts])
    padded = np.full((len(prompts), how.prompt_len), self._tokenizer.pad_id, np.int32)
    t, layers = self._config.train, Schedule.from_config(self._config.model)
    active = self._config.model.num_experts_per_tok
    below = t.replay.decoder_len if t.replay else t.seq_len
    lines = len(prompts)
    encoder = np.full((lines, len(layers.encoder), t.seq_len, active), -1, np.int32)
    decoder = np.full((lines, len(layers.decoder), below, active), -1, np.int32)
    for i, (prompt, plan) in enumerate(zip(prompts, plans)):
      padded[i, : lengths[i]] = prompt.tokens
      ends = lengths[i] + written[i]
      reread = ends - plan.encoder_start if plan.cached else 0  # to the replay's own segment
      for number, (part, experts) in enumerate(zip(parts, found.read, strict=True)):
        live = np.asarray(part.rows.segments[i]) > 0
        own = plan.cached == 0 or (number == 0 and len(parts) > 1)
        at = np.asarray(part.rows.positions[i])[live] + (0 if own else reread)
        encoder[i][:, at] = experts[:, i, live]
      live = np.asarray(parts[-1].rows.segments[i]) > 0
      decoder[i][:, : live.sum()] = found.answered[:, i, live]
      more = np.arange(written[i] - 1)
      encoder[i][:, lengths[i] + reread + more] = found.encoder[:, i, more]
      decoder[i][:, lengths[i] - plan.decoder_start + more] = found.decoder[:, i, more]
    hits = np.array([plan.cached for plan in plans])
    return Rollout(
        padded, lengths, hits, found.tokens, found.logprobs, written, rewards, advantages, encoder,
        decoder,
    )  # fmt: skip

  def _collated(self, r: Rollout) -> Batch:
    """Batches [updates, accumulation, batch_size, ...] of a rollout."""
    t, how, model = self._config.train, self._how, self._config.model
    examples, turns = [], []
    for text, length, response, n, hit in zip(r.prompts, r.lengths, r.responses, r.written, r.hits):
      tokens = np.concatenate([text[:length], response[:n]]).astype(np.int32)
      examples.append(Example(tokens, np.arange(length + n) >= length))
      turns.append([Turn(int(length), int(length + n), int(hit))])
    views = Views(
        examples, replay=t.replay, window=model.sliding_window, multiple=self._multiple,
        turns=turns,
    )  # fmt: skip
    order = model.engram_max_ngram_size if model.engram_layer_ids else 0
    lines = [[i] for i in range(len(examples))]
    batch = collate(views, lines, t.seq_len, self._tokenizer.pad_id, self._classes, order)
    logprobs = np.zeros(batch.targets.shape, np.float32)
    for i, n in enumerate(r.written):
      at = np.flatnonzero(batch.weights[i])
      logprobs[i, at] = r.logprobs[i, :n]
    advantages = np.broadcast_to(r.advantages[:, None], logprobs.shape)
    batch = batch._replace(policy=Policy(logprobs, advantages, Routes(r.encoder, r.decoder)))
    shape = how.updates, t.accumulation, t.batch_size
    batch = jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]), batch)
    routes = jax.tree.map(lambda a: np.moveaxis(a, 3, 2), batch.policy.routes)
    return batch._replace(policy=batch.policy._replace(routes=routes))


def load_teacher(config: Config, mesh: Mesh | None = None) -> tuple[Transformer, ...]:
  """The teacher of distillation, on the run's mesh; nothing for other objectives.

  Raises:
    ValueError: no whole checkpoint, or one that speaks other tokens than the student.
  """
  rollout = config.train.rollout
  if rollout is None or rollout.objective != "distill":
    return ()
  teacher, model, _ = load_model(rollout.teacher, mesh=mesh)
  for what, own, other in (
      ("vocab_size", config.model.vocab_size, teacher.model.vocab_size),
      ("tokenizer", config.data.tokenizer, teacher.data.tokenizer),
  ):
    if own != other:
      raise ValueError(
          f"train.rollout.teacher {rollout.teacher} has the {what} {other}; it must have the"
          f" student's, {own}"
      )
  return (model,)
