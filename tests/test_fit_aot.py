"""Steps on slices by the real TPU compiler: what a chip holds, what never crosses the network."""

import dataclasses
import pathlib

import pytest

from deepseek_jax import cli
from deepseek_jax.config import Config, MeshConfig
from deepseek_jax.eval import fit, topologies

pytestmark = pytest.mark.slow

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
EXPERTS = 16


def sliced(**mesh) -> Config:
  """Released widths and one released Engram table in three layers with few experts."""
  config = cli.load(str(CONFIGS / "flash.py"))
  config.model.update(
      num_hidden_layers=3, compress_ratios=(2, 2, 1), kv_source_layer_ids=(0, 2),
      index_source_layer_ids=(0, 2), candidate_source_layer_id=2, n_routed_experts=EXPERTS,
      vocab_size=4096, engram_layer_ids=(1,), engram_num_embeddings=(384006168,),
      engram_compressed_vocab_size=4096, num_nextn_predict_layers=0,
  )  # fmt: skip
  config.train = None
  found = Config.from_config_dict(config)
  return dataclasses.replace(found, mesh=MeshConfig(**mesh))


def test_a_decode_step_keeps_its_caches_where_they_are():
  config = sliced(expert=16)
  found = fit.compile_for(topologies.topology("v6e:4x4"), config, "decode", context=1 << 20)
  # Of 1M tokens: half an entry of 356 bytes for the source of ratio 2, one for that of ratio 1.
  assert abs(found["bytes_by_kind_per_chip"]["cache"] / (1.5 * 356 * (1 << 20)) - 1) < 0.01
  assert found["temp_bytes_per_chip"] < 0.01 * found["argument_bytes_per_chip"]
  assert found["fits"]


def test_what_does_not_fit_is_said_and_is_no_error():
  found = fit.compile_for(topologies.topology("v5e:2x2"), sliced(expert=4), "decode")
  assert found["fits"] is False
  # A quarter of the table, and little else.
  assert 48e9 < found["hbm_bytes_per_chip"] < 56e9
  assert "RESOURCE_EXHAUSTED" in found["refusal"]
