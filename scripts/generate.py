"""Answers prompts: `generate.py --checkpoint=runs/finetune --prompt="Hello, who are you?"`.

`--prompt` may be given several times: the prompts are read as one batch. `--chat` goes on with the
lines of standard input as further turns of the first conversation. With `--store=FOLDER` global
entries outlive the process, and windows the turn.
"""

import dataclasses
import json
import pathlib
import re
import sys
import time

from absl import flags

from deepseek_jax import cli

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Workdir of a training run.")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "A user message; repeat for a batch.")
_CHAT = flags.DEFINE_bool("chat", False, "Read further turns from standard input, a line each.")
_RAW = flags.DEFINE_bool("raw", False, "Prompts are text to continue, not user messages.")
_NEW = flags.DEFINE_integer("max_new_tokens", 128, "Tokens written per turn at most.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 takes the likeliest token.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Draw from the likeliest tokens of this probability.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the draws.")
_STOP = flags.DEFINE_multi_string("stop", [], "Further stop tokens: ids, or texts of one token.")
_LOGPROBS = flags.DEFINE_bool("prompt_logprobs", False, "Add the first prompt's, in nats.")
_STORE = flags.DEFINE_string("store", None, "Folder or URL of the persistent store.")
_SERVE = flags.DEFINE_multi_string(
    "serve",
    [],
    "FIELD=VALUE of the checkpoint's serve settings, cache.main_kv=float32 for example.",
)
_EVENTS = flags.DEFINE_string("events", None, "Folder for TensorBoard events of the counters.")


class _Stream:
  """Shows a line's text as it grows; a character whose bytes are incomplete waits."""

  def __init__(self, tokenizer):
    self._tokenizer, self._ids, self._shown = tokenizer, [], 0

  def add(self, token: int) -> None:
    self._ids.append(token)
    text = self._tokenizer.decode(self._ids)
    whole = text.rstrip("\ufffd")
    sys.stdout.write(whole[self._shown :])
    sys.stdout.flush()
    self._shown = max(self._shown, len(whole))

  def end(self) -> None:
    sys.stdout.write(self._tokenizer.decode(self._ids)[self._shown :] + "\n")


def stop_ids(tokenizer, texts) -> list[int]:
  """The end token and the further ones that `--stop` names."""
  found = [tokenizer.eos_id]
  for text in texts:
    own = [int(text)] if re.fullmatch("-?[0-9]+", text) else tokenizer.encode(text)
    if len(own) != 1 or not 0 <= own[0] < tokenizer.vocab_size:
      raise ValueError(
          f"--stop is {text!r}; it must be a text of one token or an id below"
          f" {tokenizer.vocab_size}"
      )
    found += own
  return found


def serve_settings(config, changes):
  """The checkpoint's `ServeConfig` with the fields that `--serve` changes."""
  from deepseek_jax.config import CacheFormats, ServeConfig
  from deepseek_jax.fields import build

  serve = dataclasses.replace(
      config.serve, cache=config.serve.cache or CacheFormats.of(config.compute)
  )
  values = dataclasses.asdict(serve)
  for change in changes:
    name, _, text = change.partition("=")
    *path, last = name.split(".")
    node = values
    for part in path:
      node = node.get(part) if isinstance(node, dict) else None
    if not isinstance(node, dict) or last not in node or isinstance(node[last], dict):
      raise ValueError(f"--serve is {change!r}; it must be FIELD=VALUE with one of {list(values)}")
    try:
      node[last] = json.loads(text)
    except json.JSONDecodeError:
      node[last] = text
  return build(ServeConfig, values, prefix="serve.")


def main() -> dict:
  """Text and figures of the first prompt's last turn; figures of all lines together."""
  if _CHECKPOINT.value is None:
    raise ValueError("--checkpoint is missing; give the workdir of a training run")
  if not _PROMPT.value or not all(_PROMPT.value):
    raise ValueError("--prompt is empty; give a text of at least one character")
  if _CHAT.value and len(_PROMPT.value) > 1:
    raise ValueError(f"--chat goes on with one prompt; there are {len(_PROMPT.value)}")
  if not pathlib.Path(_CHECKPOINT.value).is_dir():
    raise ValueError(f"--checkpoint is {_CHECKPOINT.value}; there is no such folder")
  cli.keep_heap()
  # Bad flags need not wait for JAX.
  from deepseek_jax import tokenizer as tok
  from deepseek_jax.checkpoint import stored_checkpoint
  from deepseek_jax.serve.generate import Engine, user_turn
  from deepseek_jax.serve.sampling import Sampling

  sampling = Sampling(_TEMPERATURE.value, _TOP_P.value, _SEED.value)
  config, model, _ = stored_checkpoint.load_model(_CHECKPOINT.value)
  tokenizer = tok.from_name(config.data.tokenizer)
  stop = stop_ids(tokenizer, _STOP.value)
  engine = Engine(model, tokenizer, serve_settings(config, _SERVE.value), store=_STORE.value)
  turn = lambda text, first: (
      tokenizer.encode(text) if _RAW.value else user_turn(tokenizer, text, first=first)
  )
  texts = [turn(prompt, True) for prompt in _PROMPT.value]
  single, read, written, took = len(texts) == 1, 0, 0, 0.0
  while True:
    stream = _Stream(tokenizer)
    result = engine.generate(
        texts, max_new_tokens=_NEW.value, sampling=sampling, stop=stop,
        on_token=(lambda _, token, to=stream: to.add(token)) if single else None,
    )  # fmt: skip
    if single:
      stream.end()
    else:
      for prompt, reply in zip(_PROMPT.value, result.replies):
        sys.stdout.write(f"{prompt}\n  {tokenizer.decode(reply.tokens)}\n")
    read, written = sum(map(len, texts)), sum(len(r.tokens) for r in result.replies)
    took = result.decode_seconds
    if not (_CHAT.value and single):
      break
    line = sys.stdin.readline()
    if not line.strip():
      break
    reply = result.replies[0].tokens
    # Conversations are trained on with every response ended, also one that was cut off here.
    end = [] if reply[-1] == tokenizer.eos_id else [tokenizer.eos_id]
    texts = [texts[0] + reply + end + turn(line.rstrip("\n"), False)]
  if _EVENTS.value is not None:
    from tensorboardX import SummaryWriter

    with SummaryWriter(_EVENTS.value) as writer:
      engine.store.write_tensorboard(writer, int(time.time()))
  ratio = engine.traffic.read_to_write
  sys.stdout.write(
      f"read {engine.traffic.read} tokens, wrote {engine.traffic.written}:"
      f" read-to-write ratio {ratio:.2f}\n"
  )
  more = {}
  if _LOGPROBS.value:
    found = engine.prompt_logprobs(texts[0])
    sys.stdout.write(f"prompt: {-found.mean():.3f} nats a token\n")
    more["prompt_logprobs"] = [float(x) for x in found]
  return {
      "text": tokenizer.decode(result.replies[0].tokens),
      "prompt_tokens": read,
      "new_tokens": written,
      "prefill_seconds": result.prefill_seconds,
      # A line's first token comes from its prefill.
      "decode_tokens_per_second": (written - len(texts)) / took if took else 0.0,
      "cache_bytes": sum(result.cache_bytes.values()),
      "cache_bytes_by_part": result.cache_bytes,
      "read_to_write": ratio,
      "arms": [reply.arm for reply in result.replies],
      "cached_tokens": [reply.cached for reply in result.replies],
      "store": engine.store.counters(),
      **more,
  }


if __name__ == "__main__":
  cli.run(main)
