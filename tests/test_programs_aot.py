"""Decode step and prefill chunk by the TPU compiler: what one layer of a scanned run costs."""

import importlib.util
import pathlib
import re

import pytest

from deepseek_jax.config import Config
from deepseek_jax.eval import programs
from pallas_kernels import aot

EXPERTS = 8
# Nine Pallas kernels, three slices of the hyper-connections' weights, the window latents put by.
DECODE_KERNELS = 13
# Nine Pallas kernels too; products, two sorts and gathers of the choices, and what lies between.
PREFILL_KERNELS = 78
# Of 16 lines of 1M tokens, which hold 9 GB.
CAPACITY = 1 << 20


def sliced() -> Config:
  """Released widths in four layers, two of them one run of Reuse layers, and few experts."""
  path = pathlib.Path(__file__).parents[1] / "configs" / "flash.py"
  spec = importlib.util.spec_from_file_location("flash", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = module.get_config()
  config.model.update(
      num_hidden_layers=4, compress_ratios=(2, 2, 2, 1), kv_source_layer_ids=(0, 3),
      index_source_layer_ids=(0, 3), candidate_source_layer_id=3, n_routed_experts=EXPERTS,
      vocab_size=4096, engram_layer_ids=(), engram_num_embeddings=(), num_nextn_predict_layers=0,
  )  # fmt: skip
  config.compute.remat = "none"
  return Config.from_config_dict(config)


def decode():
  return programs.decode_step(sliced(), batch=16, capacity=CAPACITY)


def prefill():
  return programs.prefill_chunk(sliced(), batch=1, rows=2048, capacity=1 << 14)


def compiled(program, folder):
  """The report, the kernels of a Reuse layer by kind, and the program's text."""
  report = aot.compile_in_subprocess("v6e", f"{__file__}:{program}", dump=folder, timeout=1200)
  text = (folder / "program.hlo").read_text()
  return report, max(programs.loops(text), key=lambda found: sum(found.values())), text


def copied_banks(text):
  """Lines that make a layer's experts anew."""
  return re.findall(
      rf"(?m)^.* = \(?bf16\[(?:1,)?{EXPERTS},(?:2304,5120|5120,2304)\]\S* "
      r"(?:fusion|copy|copy-start|dynamic-slice|slice)\(.*$",
      text,
  )


@pytest.mark.slow
def test_decode_step(tmp_path):
  report, layer, text = compiled("decode", tmp_path)
  assert layer["custom-call"] == 9
  assert sum(layer.values()) <= DECODE_KERNELS
  assert not copied_banks(text)
  assert report.temp_bytes < 0.005 * report.argument_bytes


@pytest.mark.slow
def test_prefill_chunk(tmp_path):
  report, layer, text = compiled("prefill", tmp_path)
  assert layer["custom-call"] == 9
  assert sum(layer.values()) <= PREFILL_KERNELS
  assert not copied_banks(text)


PROGRAM = """
%inner (p: s32[]) -> s32[] {
  %a.1 = f32[8,128]{1,0} fusion(%p), kind=kLoop
}

%body.2 (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %arg = (s32[], f32[8]{0}) parameter(0)
  %number = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %one = s32[]{:T(128)} add(%number, %number)
  %at = s32[1]{0:T(128)} dynamic-slice(%table, %number)
  %start = (f32[8]{0:S(1)}, f32[8]{0}, u32[]) copy-start(%x)
  %done = f32[8]{0:S(1)} copy-done(%start)
  %buffer = u32[8]{0} custom-call(), custom_call_target="AllocateBuffer"
  %kernel = (bf16[8,128]{1,0}, f32[8]{0}) custom-call(%done), custom_call_target="tpu_custom_call"
  %loop = (s32[], f32[8]{0}) while(%t), condition=%c, body=%inner
  %fused = (f32[1]{0}, f32[8]{0}) fusion(%done), kind=kLoop, calls=%f
  %laid = f32[8]{0:T(8)} copy(%done)
  %ready = f32[8]{0} bitcast(%laid)
  ROOT %all = (s32[], f32[8]{0}) tuple(%one, %ready)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]{0}) while(%t), condition=%c, body=%body.2
}
"""


def test_loops_count_what_the_core_runs():
  inner, body = programs.loops(PROGRAM)
  assert inner == {"fusion": 1}
  assert body == {"custom-call": 1, "while": 1, "fusion": 1, "copy": 1}


def test_programs_without_loops_have_no_layers():
  assert programs.loops("ENTRY %main (x: f32[8]) -> f32[8] {\n  %a = f32[8]{0} fusion(%x)\n}") == []
