"""The door of configuration: released files as they stand, everything else refused by name."""

import dataclasses
import json
import pathlib

import jax
import pytest

from configs import flash
from deepseek_jax.config import Config, ModelConfig
from deepseek_jax.fields import build
from deepseek_jax.model_config import read_released

GOLDEN = pathlib.Path(__file__).parent / "golden"
FLASH = Config.from_config_dict(flash.get_config())


def flash_with(**changes):
  return dataclasses.replace(FLASH.model, **changes)


def test_the_checkpoints_config_is_read_as_it_stands():
  config = read_released(GOLDEN / "checkpoint_tiny" / "config.json")
  assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (64, 8, 64)
  assert config.compress_ratios == (0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0)
  assert config.num_nextn_predict_layers == 3
  assert config.rope_theta == 10000.0
  assert isinstance(config.rope_theta, float)
  assert config.rope_scaling.original_max_position_embeddings == 32
  assert config.engram_num_embeddings == (434, 606)


def test_the_yardstick_config_is_read_as_it_stands():
  config = read_released(GOLDEN / "yardstick_config.json")
  assert (config.hidden_size, config.n_routed_experts, config.index_topk) == (512, 16, 64)
  assert config.engram_layer_ids == ()
  assert (config.candidate_topk_blocks, config.candidate_block_size) == (32, 8)


def test_a_bare_text_config_is_read_too():
  root = json.loads((GOLDEN / "yardstick_config.json").read_text())
  assert ModelConfig.from_released(root["text_config"]) == ModelConfig.from_released(root)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "holds list; a released config.json is an object")],
)
def test_a_file_that_is_no_config_is_named(tmp_path, text, message):
  path = tmp_path / "config.json"
  path.write_text(text)
  with pytest.raises(ValueError, match=message) as error:
    read_released(path)
  assert str(path) in str(error.value)


RELEASED = json.loads((GOLDEN / "checkpoint_tiny" / "config.json").read_text())["text_config"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_dim": 64}, r"unknown key text_config\.hidden_dim; ModelConfig has vocab_size"),
        ({"hidden_size": "64"}, r"text_config\.hidden_size must be int, got '64'"),
        ({"hidden_size": 64.0}, r"text_config\.hidden_size must be int, got 64\.0"),
        ({"hidden_size": True}, r"text_config\.hidden_size must be int, got True"),
        ({"compress_ratios": 2}, r"text_config\.compress_ratios must be a list of int, got 2"),
        ({"compress_ratios": [0, 1.5]}, r"text_config\.compress_ratios\[1\] must be int, got 1\.5"),
        (
            {"rope_scaling": 16},
            r"text_config\.rope_scaling must be a mapping .*, got 16",
        ),
        ({"rope_scaling": {"mscale": 1}}, r"unknown key text_config\.rope_scaling\.mscale"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_type is 'linear'; it must be 'yarn'"),
        ({"scoring_func": "sigmoid"}, r"scoring_func is 'sigmoid'; it must be 'sqrtsoftplus'"),
        ({"num_key_value_heads": 8}, r"num_key_value_heads is 8; it must be 1"),
        ({"tie_word_embeddings": True}, r"tie_word_embeddings is True; it must be False"),
    ],
)
def test_keys_types_and_fixed_values_of_a_released_config(change, message):
  with pytest.raises(ValueError, match=message):
    ModelConfig.from_released(RELEASED | change)


def test_a_missing_key_is_named():
  with pytest.raises(ValueError, match=r"text_config\.head_dim is missing; ModelConfig needs it"):
    ModelConfig.from_released({k: v for k, v in RELEASED.items() if k != "head_dim"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0; it must be at least 1"),
        ({"head_dim": 48}, r"head_dim is 48; .*multiple of 32.*FP8.*FP4"),
        ({"index_head_dim": 80}, r"index_head_dim is 80; .*multiple of 32.*MXFP4"),
        ({"qk_rope_head_dim": 65}, r"qk_rope_head_dim is 65; .*even and within 2\.\.128"),
        ({"qk_rope_head_dim": 256}, r"qk_rope_head_dim is 256; .*within 2\.\.128"),
        ({"o_groups": 7}, r"o_groups is 7; .*divisor of num_attention_heads \(64\)"),
        ({"num_experts_per_tok": 385}, r"num_experts_per_tok is 385; .*n_routed_experts \(384\)"),
        ({"index_topk": 0}, "index_topk is 0; it must be at least 1"),
        ({"index_topk": 2**21}, r"index_topk is 2097152; .*max_position_embeddings \(1048576\)"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0; it must be above 0"),
        ({"engram_layer_ids": (1,)}, r"engram_num_embeddings is \(384006168, 384016682\)"),
        ({"engram_head_dim": 0}, "engram_head_dim is 0; it must be at least 1 with Engram layers"),
        ({"engram_compressed_vocab_size": 129281}, r"engram_compressed_vocab_size is 129281"),
        ({"engram_pad_token_id": -1}, "engram_pad_token_id is -1; .*token id below 129280"),
    ],
)
def test_sizes_that_the_model_or_a_format_cannot_hold(changes, message):
  with pytest.raises(ValueError, match=message):
    flash_with(**changes)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (
            "compute",
            {"dtype": "float16"},
            r"compute\.dtype is 'float16'; .*'bfloat16'",
        ),
        ("compute", {"quantize": ["kv"]}, r"compute\.quantize is 'kv'; .*main_kv"),
        ("compute", {"remat": "full"}, r"compute\.remat is 'full'; .*none"),
        ("compute", {"row_chunk": 0}, r"compute\.row_chunk is 0; .*at least 1"),
        ("compute", {"flash": True}, r"unknown key compute\.flash"),
        ("train", {"index_loss": "dense"}, r"train\.index_loss is 'dense'; .*warmup"),
        ("train", {"warmup_steps": 1001}, r"train\.warmup_steps is 1001; .*0\.\.train\.steps"),
        ("data", {"eval_fraction": 1.0}, r"data\.eval_fraction is 1\.0; .*\[0, 1\)"),
    ],
)
def test_other_sections_name_field_value_and_what_is_allowed(part, change, message):
  values = flash.get_config().to_dict()
  values[part] = values[part] | change
  with pytest.raises(ValueError, match=message):
    build(Config, values)


def test_an_unknown_section_is_an_error():
  config = flash.get_config()
  config.serving = {}
  with pytest.raises(ValueError, match=r"unknown key serving; Config has model, compute"):
    Config.from_config_dict(config)


def test_equal_configs_are_one_static_argument():
  other = Config.from_config_dict(flash.get_config())
  assert other is not FLASH
  assert (other, hash(other)) == (FLASH, hash(FLASH))
  traces = []

  def width(config):
    traces.append(config)
    return config.model.hidden_size

  run = jax.jit(width, static_argnums=0)
  assert run(FLASH) == run(other) == 5120
  assert len(traces) == 1


def test_a_config_is_frozen():
  with pytest.raises(dataclasses.FrozenInstanceError):
    FLASH.model.hidden_size = 1


def test_text_form_is_stable_and_complete():
  again = json.loads(FLASH.to_json())
  assert build(Config, again) == FLASH
  assert Config.from_config_dict(flash.get_config()).to_json() == FLASH.to_json()
