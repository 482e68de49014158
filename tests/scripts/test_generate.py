"""The program that answers prompts, over a checkpoint of its own making."""

import io
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from absl.testing import flagsaver
from flax import nnx

from deepseek_jax import tokenizer as tok
from deepseek_jax.checkpoint import training
from deepseek_jax.config import Config, ModelConfig, ServeConfig
from deepseek_jax.nn.transformer import Transformer
from deepseek_jax.serve.generate import user_turn
from scripts import generate

ROOT = pathlib.Path(__file__).parents[2]
KEYS = {
    "text", "prompt_tokens", "new_tokens", "prefill_seconds", "decode_tokens_per_second",
    "cache_bytes",
}  # fmt: skip
CONFIG = Config(
    model=ModelConfig(
        vocab_size=264, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=2, head_dim=32, qk_rope_head_dim=8, q_lora_rank=16, o_lora_rank=8,
        o_groups=2, n_routed_experts=4, num_experts_per_tok=2, sliding_window=4,
        compress_ratios=(0, 2, 1), kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2),
        index_n_heads=2, index_head_dim=32, index_topk=8, max_position_embeddings=200,
    ),
    serve=ServeConfig(buckets=(8,), block=8),
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  jax.config.update("jax_disable_most_optimizations", True)
  workdir = tmp_path_factory.mktemp("run")
  model = jax.jit(lambda: nnx.state(Transformer(CONFIG.model, rngs=nnx.Rngs(3))))()
  checkpoints = training.Checkpoints(workdir / "checkpoints")
  checkpoints.save(1, {"params": model}, {}, CONFIG)
  checkpoints.close()
  yield workdir
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def run(checkpoint, capsys, monkeypatch):
  """Returns `run(prompt=..., flag=value...)`: what the program returns, and what it has shown."""
  monkeypatch.setattr(generate.cli, "keep_heap", lambda: None)

  def run(**values):
    values = dict(checkpoint=str(checkpoint), prompt=["Hello"], max_new_tokens=4) | values
    with flagsaver.flagsaver(**values):
      if not generate.flags.FLAGS.is_parsed():
        generate.flags.FLAGS.mark_as_parsed()
      found = generate.main()
    return found, capsys.readouterr().out

  return run


def test_one_prompt_is_streamed_and_counted(run):
  found, shown = run()
  assert set(found) >= KEYS
  # Begin, user, five letters, assistant.
  assert (found["prompt_tokens"], found["new_tokens"]) == (8, 4)
  assert shown == f"{found['text']}\nread 8 tokens, wrote 4: read-to-write ratio 2.00\n"
  assert found["read_to_write"] == 2
  assert (found["arms"], found["cached_tokens"], found["store"]) == (["B"], [0], {})
  assert found["cache_bytes"] == sum(found["cache_bytes_by_part"].values()) > 0
  assert found["prefill_seconds"] > 0
  assert found["decode_tokens_per_second"] > 0
  json.dumps(found, allow_nan=False)
  assert run()[0]["text"] == found["text"]


@pytest.mark.slow
def test_several_prompts_are_one_batch(run):
  alone = [run(prompt=[prompt])[0]["text"] for prompt in ("Hello", "Good morning")]
  found, shown = run(prompt=["Hello", "Good morning"])
  assert found["text"] == alone[0]
  assert shown.startswith(f"Hello\n  {alone[0]}\nGood morning\n  {alone[1]}\n")
  assert (found["prompt_tokens"], found["new_tokens"]) == (8 + 15, 8)


def test_raw_text_is_continued_and_a_stop_token_ends_it(run, monkeypatch):
  found, _ = run(raw=True, max_new_tokens=6)
  assert found["prompt_tokens"] == 5
  assert found["new_tokens"] == 6
  tokens = []
  monkeypatch.setattr(generate._Stream, "add", lambda self, token: tokens.append(token))
  run(raw=True, max_new_tokens=6)
  ended, _ = run(raw=True, max_new_tokens=6, stop=[str(tokens[2])])
  assert ended["new_tokens"] == tokens.index(tokens[2]) + 1
  assert ended["prompt_tokens"] == 5


def test_draws_follow_the_seed(run):
  ask = lambda seed: run(temperature=1.5, top_p=0.9, seed=seed, max_new_tokens=16)[0]["text"]
  assert ask(1) == ask(1) != ask(2)


def test_a_chat_continues_and_a_later_process_replays(run, tmp_path, monkeypatch):
  """Turns are lines of standard input; an empty one or its end is the last."""
  more = dict(chat=True, store=str(tmp_path / "store"), events=str(tmp_path / "events"))
  monkeypatch.setattr(sys, "stdin", io.StringIO("How are you?\nFine\n\nnever read\n"))
  found, shown = run(**more)
  assert sys.stdin.read() == "never read\n"
  # The conversation so far, the end of a reply that was cut off, user, the text, assistant.
  read = [8, 8 + 5 + 14, 8 + 5 + 14 + 5 + 6]
  assert found["prompt_tokens"] == read[-1]
  assert (found["arms"], found["cached_tokens"]) == (["C"], [(read[1] + 3) // 2 * 2])
  assert found["store"]["continued"] == 2
  assert found["read_to_write"] == sum(read) / 12
  assert shown.count("\n") >= 4
  assert [*(tmp_path / "events").iterdir()]
  monkeypatch.setattr(sys, "stdin", io.StringIO("How are you?\nFine\n"))
  later, _ = run(**more)
  # The window of the first turn is kept again, but far behind what is found of the second.
  assert later["store"]["replayed"] == 2
  assert later["store"]["persistent/hits"] == 3


class TestStream:

  @pytest.mark.parametrize("seed", range(20))
  def test_every_byte_is_shown_once_and_no_character_in_parts(self, capsys, seed):
    rng, tokenizer = np.random.default_rng(seed), tok.ByteTokenizer()
    text = "".join(rng.choice([*"ab \n", "é", "€", "😀", "\ufffd", "日"], 30))
    ids = tokenizer.encode(text) if seed % 2 else rng.integers(0, 264, 60).tolist()
    stream, shown = generate._Stream(tokenizer), ""
    for count, token in enumerate(ids, 1):
      stream.add(token)
      new = capsys.readouterr().out
      shown += new
      assert not new.endswith("\ufffd")
      # What is shown early never changes.
      assert tokenizer.decode(ids[:count]).startswith(shown)
      assert tokenizer.decode(ids).startswith(shown)
    stream.end()
    assert shown + capsys.readouterr().out == tokenizer.decode(ids) + "\n"

  def test_a_character_appears_with_its_last_byte(self, capsys):
    tokenizer = tok.ByteTokenizer()
    stream, came = generate._Stream(tokenizer), []
    for token in tokenizer.encode("a€😀b"):
      stream.add(token)
      came.append(capsys.readouterr().out)
    assert came == ["a", "", "", "€", "", "", "", "😀", "b"]


def test_stop_tokens_are_ids_or_texts_of_one_token():
  tokenizer = tok.ByteTokenizer()
  assert generate.stop_ids(tokenizer, []) == [1]
  assert generate.stop_ids(tokenizer, ["a", "263", "0"]) == [1, 105, 263, 0]
  for text in ("", "ab", "é", "264", "-1", "--1", "²", "1.5"):
    with pytest.raises(ValueError, match=r"^--stop is .*; it must be a text of one token or an id"):
      generate.stop_ids(tokenizer, [text])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"checkpoint": None}, "--checkpoint is missing; give the workdir"),
        ({"checkpoint": "no/such/folder"}, "--checkpoint is no/such/folder; there is no such"),
        ({"prompt": []}, "--prompt is empty; give a text"),
        ({"prompt": ["Hi", ""]}, "--prompt is empty; give a text"),
        ({"stop": ["nonsense"]}, "--stop is 'nonsense'; it must be a text of one token"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be within"),
        ({"temperature": -1.0}, "temperature is -1.0; it must be"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"prompt": ["x" * 200]}, "has 203 tokens, max_new_tokens is 4; the model has 200"),
        ({"chat": True, "prompt": ["a", "b"]}, "--chat goes on with one prompt; there are 2"),
    ],
)
def test_bad_input_is_refused_and_named(run, values, says):
  with pytest.raises(ValueError, match=says):
    run(**values)


def test_a_folder_without_checkpoints_is_refused_and_left_as_it_is(run, tmp_path):
  with pytest.raises(ValueError, match="no checkpoint"):
    run(checkpoint=str(tmp_path))
  assert not [*tmp_path.iterdir()]


def test_a_store_of_another_format_version_is_refused(run, tmp_path):
  (tmp_path / "manifest.json").write_text('{"version": 99}')
  with pytest.raises(ValueError, match="has format version 99"):
    run(store=str(tmp_path))


def program(*flags):
  return subprocess.run(
      [sys.executable, "scripts/generate.py", *flags], cwd=ROOT, check=False, text=True,
      env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}, capture_output=True,
  )  # fmt: skip


def test_bad_input_ends_with_status_2_and_one_sentence(tmp_path):
  for flags, says in (
      (["--prompt=Hi"], "--checkpoint is missing"),
      ([f"--checkpoint={tmp_path}", "--prompt="], "--prompt is empty"),
      (["--checkpoint=no/such/folder", "--prompt=Hi"], "no such folder"),
      (["--max_new_tokens=many"], "max_new_tokens"),
  ):
    done = program(*flags, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_repeated_prompt_hits_in_a_new_process(checkpoint, tmp_path):
  flags = f"--checkpoint={checkpoint}", "--max_new_tokens=4", f"--store={tmp_path}", "--json"
  prompt = "Hello there"
  for arm, cached in ("B", 0), ("D", 14):
    done = program(*flags, f"--prompt={prompt}")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["arms"], found["cached_tokens"]) == ([arm], [cached])
    assert found["store"]["persistent/hits"] == (arm == "D")
    assert found["store"].get("replayed_tokens", 0) == 4 * (arm == "D")
  done = program(*flags, f"--prompt={prompt}", "--top_p=0")
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr == "error: top_p is 0.0; it must be within (0, 1]\n"


def test_serve_settings_change_those_of_the_checkpoint():
  of = lambda *changes: generate.serve_settings(CONFIG, changes)
  assert of().cache.main_kv == CONFIG.compute.dtype
  changed = of("cache.main_kv=bfloat16", "ttl_minutes=10", "buckets=[4,16]")
  assert (changed.cache.main_kv, changed.ttl_minutes, changed.buckets) == (
      "bfloat16",
      10.0,
      (4, 16),
  )
  for change, says in (
      ("ttl_minutes=0", "serve.ttl_minutes is 0.0; it must be above 0"),
      ("budget_bytes=0", "serve.budget_bytes is 0; it must be above 0"),
      ("cache.main_kv=int3", "serve.cache.main_kv is 'int3'"),
      ("cache=float32", "--serve is 'cache=float32'"),
      ("ttl=3", "--serve is 'ttl=3'"),
      ("block", "serve.block must be int"),
  ):
    with pytest.raises(ValueError, match=says):
      of(change)


def test_a_message_cannot_forge_a_turn():
  class Forging(tok.ByteTokenizer):

    def encode(self, text):
      return [*super().encode(text), self.assistant_id]

  with pytest.raises(ValueError, match="holds a control token"):
    user_turn(Forging(), "hello", first=True)
