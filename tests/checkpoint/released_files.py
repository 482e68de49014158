"""Released checkpoints that hold nothing but zeros, at any size: sparse files."""

import dataclasses
import json

from flax import nnx

from deepseek_jax.checkpoint import parts, released_writer, side_files
from deepseek_jax.config import Config
from deepseek_jax.nn.transformer import Transformer

# The sum of the 24 primes from 160,000 on.
ROWS = 3_842_930


def write_zeros(folder, config: Config, shard_bytes: int) -> int:
  """Shards, index and config.json of a model; returns the bytes of the tensors."""
  model = nnx.eval_shape(lambda: Transformer(config.model, config.compute, rngs=nnx.Rngs(0)))
  layout = released_writer.fresh_layout(parts.wanted(parts.plan(model)), shard_bytes)
  for name, shard in layout.items():
    with (folder / name).open("wb") as file:
      file.write(len(shard.header).to_bytes(8, "little") + shard.header)
      file.truncate(file.tell() + shard.num_bytes)
  (folder / "model.safetensors.index.json").write_text(released_writer.make_index(layout))
  (folder / "config.json").write_text(json.dumps(side_files.released_config(config.model)))
  return sum(shard.num_bytes for shard in layout.values())


def two_released_layers(config: Config) -> Config:
  """Of the released model: a window layer, a Full one with an Engram of fewer rows."""
  model = dataclasses.replace(
      config.model, num_hidden_layers=2, compress_ratios=(0, 1), num_nextn_predict_layers=0,
      kv_source_layer_ids=(1,), index_source_layer_ids=(1,), candidate_source_layer_id=None,
      candidate_topk_blocks=0, engram_layer_ids=(1,), engram_num_embeddings=(ROWS,),
      engram_vocab_size=160_000,
  )  # fmt: skip
  return dataclasses.replace(config, model=model)
