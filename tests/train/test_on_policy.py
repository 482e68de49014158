"""Laws of batches that the model writes: seed and step decide, and a stop loses nothing."""

import dataclasses
import json
import zlib

import jax
import numpy as np
import pytest
from flax import nnx

from deepseek_jax.checkpoint.training import Checkpoints
from deepseek_jax.config import Config, DataConfig, MeshConfig, ReplayConfig
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.train import loop, rollouts, step
from deepseek_jax.train.on_policy import OnPolicy, load_teacher
from tests.train import policies
from tests.train.policies import SMALL, Given, Letters, experiment
from tests.train.talks import conversation

REPLAYS = ReplayConfig(decoder_len=14, encoder=0.5)
LONG = dict(prompt_len=64)
SEQ = dict(seq_len=144)


@pytest.fixture
def _written(monkeypatch):
  """Rollouts that nothing is compiled for: a function of parameters, prompts and seed."""

  def write(model, cache, parts, floors, classes, seed, *, new, temperature, stop, mesh):
    known = [*jax.tree.leaves(nnx.state(model)), *(part.tokens for part in parts), floors, seed]
    rng = np.random.default_rng([zlib.crc32(np.asarray(a).tobytes()) for a in known])
    lines, model = len(floors), model.config
    experts = lambda n: rng.integers(0, model.n_routed_experts, (1, lines, n, 2), np.int32)
    live = np.arange(new) < rng.integers(1, new + 1, (lines, 1))
    return rollouts.Written(
        rng.integers(8, 64, (lines, new)).astype(np.int32), live,
        rng.random((lines, new)).astype(np.float32) - 5,
        tuple(experts(part.tokens.shape[1]) for part in parts),
        experts(parts[-1].tokens.shape[1]), experts(new), experts(new),
    )  # fmt: skip

  monkeypatch.setattr(rollouts, "write", write)


def parameters(seed):
  return policies.split_model(SMALL, seed)[1]


def retrieval(seed=0, **how):
  """An iterator over prompts of the task, two updates a rollout."""
  how = LONG | dict(prompts="retrieval", updates=2, group=2) | how
  config = experiment(SMALL, REPLAYS, SEQ | dict(seed=seed), **how)
  made = OnPolicy(config, Letters(), policies.split_model(SMALL)[0], reward=reward)
  made.see(parameters(0))
  return made


def reward(text, answer):
  return float(text[0] == answer[0])


def same(one, other):
  a, b = jax.tree.leaves(one), jax.tree.leaves(other)
  return len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b))


@pytest.mark.usefixtures("_written")
class TestBatches:

  def test_seed_and_step_decide(self):
    batches = [next(made).batch for made in [retrieval()] * 6]
    again = [next(made).batch for made in [retrieval()] * 6]
    assert same(batches, again)
    assert not any(same(batches[i], batches[j]) for i in range(6) for j in range(i))
    assert not same(batches[0], next(retrieval(seed=1)).batch)

  def test_a_rollout_is_written_with_the_parameters_of_its_first_step(self):
    made, other = retrieval(), retrieval()
    assert same(next(made).batch, next(other).batch)
    other.see(parameters(1))
    assert same(next(made).batch, next(other).batch)
    assert not same(next(made).batch, next(other).batch)

  @pytest.mark.parametrize("steps", range(5))
  def test_a_state_continues_wherever_it_was_taken(self, steps):
    """Also between the steps of one rollout, though the parameters are not those it had."""
    made = retrieval()
    for number in range(steps):
      made.see(parameters(number))
      next(made)
    state = made.get_state()
    assert ("rollout" in state) == (steps % 2 == 1)
    other = retrieval()
    other.set_state(json.loads(json.dumps(state)))
    for number in range(steps, steps + 3):
      for each in (made, other):
        each.see(parameters(number))
      assert same(next(made).batch, next(other).batch)
      assert made.metrics == other.metrics

  def test_a_state_of_other_rollouts_is_refused(self):
    state = retrieval().get_state()
    for other in (
        retrieval(temperature=0.9), retrieval(updates=1), retrieval(penalty=0.1),
        retrieval(prompts="arithmetic"), retrieval(seed=1),
    ):  # fmt: skip
      with pytest.raises(ValueError, match=f"data {state['data']} is not .* of this run"):
        other.set_state(state)

  def test_every_group_answers_one_prompt_and_levels_of_effort_take_turns(self):
    made, levels = retrieval(efforts=(50, 75, 100), group=4, updates=1), []
    for number in range(3):
      found = made._drawn_prompts(number)
      assert len(found) == 4
      assert len({prompt.tokens.tobytes() for prompt in found}) == 1
      levels.append(found[0].effort)
    assert levels == [50, 75, 100]

  def test_prompts_of_conversations_come_without_reward(self):
    talk = [conversation([(9, 4), (6, 2)], seed=seed) for seed in range(5)]
    talk = [example._replace(tokens=example.tokens % 64) for example in talk]
    config = experiment(SMALL, REPLAYS, SEQ, objective="distill", prompts="data", teacher="x")
    made = OnPolicy(config, Letters(), policies.split_model(SMALL)[0], talk)
    made.see(parameters(0))
    batch = next(made).batch
    assert not batch.policy.advantages.any()
    assert set(made.metrics) == {"response_tokens", "hits"}
    begins = {tuple(example.tokens[:n]) for example in talk for n in (9, 19)}
    for tokens, length in zip(made._rollout.prompts, made._rollout.lengths):
      assert tuple(tokens[:length]) in begins

  def test_metrics_are_of_the_rollout(self):
    made = retrieval()
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(OnPolicy, "_hit", lambda self, prompt, number, line: 38 * (line % 4 == 0))
      next(made)
    r = made._rollout
    expected = dict(response_tokens=r.written.mean(), hits=0.25, reward=r.rewards.mean())
    assert made.metrics == {name: float(value) for name, value in expected.items()}


@pytest.mark.usefixtures("_written")
class TestBadInput:

  def test_a_prompt_that_is_too_long(self):
    message = r"prompt of retrieval has \d+ tokens; train.rollout.prompt_len is 40"
    with pytest.raises(ValueError, match=message):
      next(retrieval(prompt_len=40))

  def test_data_without_a_short_prompt(self):
    config = experiment(SMALL, REPLAYS, objective="distill", prompts="data", teacher="x")
    with pytest.raises(ValueError, match="prompt_len is 20; no prompt of the data is as short"):
      OnPolicy(config, Letters(), None, [conversation([(21, 4)])])

  def test_a_reward_that_is_not_finite(self):
    config = experiment(SMALL)
    made = Given(config, policies.prompts(), reward=lambda *_: float("nan"))
    with pytest.raises(ValueError, match="reward of response 0 is nan; rewards must be finite"):
      next(made)

  @pytest.mark.parametrize(
      ("change", "message"),
      [
          (dict(objective="ppo"), "train.rollout.objective is 'ppo'"),
          (dict(prompts="chess"), "train.rollout.prompts is 'chess'"),
          (dict(prompts="data"), "train.rollout.prompts is 'data'; .* a task with a reward"),
          (dict(group=1), "train.rollout.group is 1; it must be at least 2, for a baseline"),
          (dict(group=3), "train.rollout.group is 3; it must be a divisor of the 8 lines"),
          (dict(objective="distill"), "train.rollout.teacher is ''; .* workdir of a checkpoint"),
          (dict(temperature=0.0), "train.rollout.temperature is 0.0; it must be above 0"),
          (dict(clip=-0.1), "train.rollout.clip is -0.1; it must be at least 0"),
          (dict(efforts=(0,)), r"train.rollout.efforts is \(0,\); .* levels within 1..100"),
          (dict(prompt_len=21), "train.seq_len is 56; it must be at least 58 for rollouts"),
          (dict(max_new_tokens=11), "train.replay.decoder_len is 14; it must be at least 15"),
      ],
  )
  def test_a_configuration_is_refused_and_the_field_named(self, change, message):
    seq_len = 56 if "prompt_len" in change else 144
    with pytest.raises(ValueError, match=message):
      experiment(SMALL, REPLAYS, dict(seq_len=seq_len), **change)

  def test_a_mesh_that_divides_rows(self):
    with pytest.raises(ValueError, match="mesh.seq is 2; it must be 1 with train.rollout"):
      dataclasses.replace(experiment(SMALL), mesh=MeshConfig(seq=2))

  def test_a_teacher_of_another_vocabulary(self, tmp_path):
    teacher = Config(model=dataclasses.replace(SMALL, vocab_size=65), compute=policies.COMPUTE)
    save(teacher, tmp_path)
    config = experiment(SMALL, objective="distill", prompts="data", teacher=str(tmp_path))
    message = "has the vocab_size 65; it must have the student's, 64"
    with pytest.raises(ValueError, match=message):
      load_teacher(config)
    config = dataclasses.replace(config, model=teacher.model)
    assert load_teacher(config)[0].config == teacher.model
    config = dataclasses.replace(config, data=DataConfig(tokenizer="deepseek"))
    with pytest.raises(ValueError, match="has the tokenizer bytes; .* student's, deepseek"):
      load_teacher(config)

  def test_a_teacher_that_is_not_there(self, tmp_path):
    teacher = str(tmp_path / "none")
    config = experiment(SMALL, objective="distill", prompts="data", teacher=teacher)
    with pytest.raises(ValueError, match="none: no checkpoint"):
      load_teacher(config)


def save(config, workdir, seed=0):
  """A checkpoint of fresh parameters."""
  model = Transformer(config.model, config.compute, rngs=nnx.Rngs(seed))
  checkpoints = Checkpoints(workdir / "checkpoints")
  checkpoints.save(1, {"params": nnx.state(model)}, {}, config)
  checkpoints.close()


class Killed(BaseException):
  """Stands for a kill: nothing in the run handles it."""


@pytest.mark.slow
class TestRuns:
  """Three steps of runs whose programs are compiled once for all of them."""

  MODEL = dataclasses.replace(SMALL, vocab_size=264, sliding_window=12)
  HOW = dict(prompt_len=56, max_new_tokens=6, updates=2)

  @pytest.fixture(scope="class", autouse=True)
  @classmethod
  def _compiled_once(cls, tmp_path_factory):
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("cache")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(loop._Training, "finish", lambda *_: None)
      yield
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    jax.config.update("jax_disable_most_optimizations", False)

  @classmethod
  def experiment(cls, data="chatterbot", **rollout):
    config = experiment(
        cls.MODEL, ReplayConfig(decoder_len=20, encoder=0.5),
        dict(
            steps=3, batch_size=2, accumulation=1, seq_len=124, schedule="constant",
            learning_rate=1e-2, checkpoint_every=1, eval_every=3, balance_loss=0.0,
        ),
        **cls.HOW | rollout,
    )  # fmt: skip
    return dataclasses.replace(config, data=DataConfig(source=data))

  @pytest.fixture(scope="class", params=["grpo", "distill"])
  @classmethod
  def whole(cls, request, tmp_path_factory, talk):
    """Configuration and records of an uninterrupted run."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "grpo":
      config = cls.experiment(prompts="retrieval", group=4)
    else:
      save(Config(model=cls.MODEL, compute=policies.COMPUTE), folder / "teacher", seed=1)
      config = cls.experiment(
          str(talk), objective="distill", prompts="data", group=1, teacher=str(folder / "teacher")
      )
    with pytest.MonkeyPatch.context() as patch:
      # Untrained models are never right.
      graded = lambda text, _: zlib.crc32(text.encode()) / 2**32
      patch.setattr(OnPolicy.__init__, "__kwdefaults__", {"reward": graded})
      yield config, cls.run(config, folder / "run"), folder

  @staticmethod
  def run(config, workdir, resume=False):
    loop.run(config, workdir, resume)
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]

  def test_a_run_records_what_was_written(self, whole):
    config, records, _ = whole
    assert [r["step"] for r in records] == [1, 2, 3]
    for r in records:
      assert 1 <= r["response_tokens"] <= 6
      assert np.isfinite(r["loss"])
      assert r["grad_norm"] > 0
      assert ("reward" in r) == (config.train.rollout.objective == "grpo")
    if config.train.rollout.objective == "distill":
      assert all(r["loss"] > 0.01 for r in records)
      assert "eval_loss" in records[-1]

  def test_a_run_that_is_stopped_twice_continues_bit_for_bit(self, whole, monkeypatch):
    """After one step of a rollout's two, and after both."""
    config, records, folder = whole
    report = loop._Training._report
    for last in (1, 2):

      def dying(self, now, *rest, last=last):
        if now > last:
          raise Killed
        return report(self, now, *rest)

      with monkeypatch.context() as patch:
        patch.setattr(loop._Training, "_report", dying)
        with pytest.raises(Killed):
          self.run(config, folder / "stopped", resume=last > 1)
    again = self.run(config, folder / "stopped", resume=True)
    exact = "loss", "grad_norm", "response_tokens", "hits"
    assert [[r[key] for key in exact] for r in again] == [
        [r[key] for key in exact] for r in records
    ]

  def test_a_student_like_its_teacher_has_neither_loss_nor_gradient(self, whole):
    """Prompts of the data are shorter than the window, so that no row is left out or replayed."""
    config, _, _ = whole
    if config.train.rollout.objective == "grpo":
      return
    pipeline, state = loop.load_data(config).pipeline, step.init_state(config)
    state = jax.device_put(state, jax.local_devices()[0])  # as the run, for its program
    pipeline.see(state.params)
    batch = next(pipeline).batch
    graphdef, _ = step.abstract_model(config)
    student = nnx.merge(graphdef, jax.tree.map(lambda a: a.copy(), state.params))
    _, metrics = step.make_step(graphdef, config)(state, batch, student)
    assert batch.weights.sum() > 2
    assert abs(float(metrics.loss)) < 1e-5
    assert float(metrics.grad_norm) < 1e-4
