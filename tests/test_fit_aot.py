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
  config.train.update(seq_len=8192, frozen=(r"engram\.embed",))
  found = Config.from_config_dict(config)
  return dataclasses.replace(found, mesh=MeshConfig(**mesh))


def test_a_training_step_gathers_no_bank_and_no_table():
  config = sliced(expert=4, seq=2)
  found = fit.compile_for(topologies.topology("v6e:2x4"), config, "train")
  model = config.model
  bank = 2 * EXPERTS * model.moe_intermediate_size * model.hidden_size  # one of its matrices
  table = 2 * 384006168 * model.engram_head_dim
  moved = found["collectives"]
  # XLA may gather by an all-reduce over zeros.
  gathers = [
      each["largest"] for kind, each in moved.items() if kind in ("all-gather", "all-reduce")
  ]
  assert max(gathers) < min(bank, table) / 4
  assert moved["all-to-all"]["count"] > 0
  # Rows of tables and experts are shared out: a chip holds an eighth.
  assert abs(found["bytes_by_kind_per_chip"]["engram_tables"] / (table / 8) - 1) < 0.001
  assert found["fits"] == (found["hbm_bytes_per_chip"] <= found["chip_hbm_bytes"])


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_serving_steps_keep_their_caches_where_they_are(mode):
  config = sliced(expert=4)
  found = fit.compile_for(
      topologies.topology("v6e:2x2"), config, mode, context=1 << 20, lines=1, rows=1024
  )
  # Of 1M tokens: half an entry of 356 bytes for the source of ratio 2, one for that of ratio 1.
  assert abs(found["bytes_by_kind_per_chip"]["cache"] / (1.5 * 356 * (1 << 20)) - 1) < 0.01
  assert found["temp_bytes_per_chip"] < found["argument_bytes_per_chip"]
  assert found["kernels_per_layer"] is None or found["kernels_per_layer"] > 0


def test_what_does_not_fit_is_said_and_is_no_error():
  found = fit.compile_for(topologies.topology("v5e:2x2"), sliced(expert=4), "decode")
  assert found["fits"] is False
  assert found["hbm_bytes_per_chip"] is None or found["hbm_bytes_per_chip"] > 15e9
