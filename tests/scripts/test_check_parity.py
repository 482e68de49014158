"""The parity program on files of its own making, and on the golden ones."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from deepseek_jax.checkpoint import released
from deepseek_jax.config import ModelConfig
from deepseek_jax.eval import golden as files
from deepseek_jax.eval import served
from deepseek_jax.nn.transformer import Transformer
from scripts import check_parity

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
ARGS = str(GOLDEN / "model_args.json")
WEIGHTS = str(GOLDEN / "model_f32.npz")
ALL = ("main_kv", "index", "window_kv")

# Another model than the golden one: official argument names, no Engram, no pool, odd length, one
# sequence without batch axis.
OFFICIAL = {
    "max_seq_len": 64, "dtype": "bf16", "vocab_size": 20, "dim": 32, "moe_inter_dim": 8,
    "n_layers": 2, "n_heads": 2, "n_routed_experts": 4, "n_activated_experts": 2,
    "hc_sinkhorn_iters": 3, "route_scale": 1.5, "swiglu_limit": 1.0, "q_lora_rank": 16,
    "head_dim": 32,
    "rope_head_dim": 8, "o_groups": 1, "o_lora_rank": 8, "window_size": 4,
    "compress_ratios": [0, 2], "kv_source_layers": [1], "index_source_layers": [1],
    "original_seq_len": 16, "rope_factor": 2.0, "index_n_heads": 8, "index_head_dim": 32,
    "index_topk": 3,
}  # fmt: skip
CONFIG = ModelConfig.from_released(files._from_official(OFFICIAL))
LENGTH = 13


@pytest.fixture(scope="module")
def stored():
  """Arrays of the other model as a golden file holds them: by rounding, `()` or `ALL`."""
  ids = np.random.default_rng(0).integers(0, 20, LENGTH).astype(np.int32)
  state = jax.jit(lambda: nnx.state(Transformer(CONFIG, rngs=nnx.Rngs(1))))()
  named = released.to_released(state, CONFIG)
  arrays = {}
  for rounding in (ALL, ()):
    model = released.load(check_parity._shapes(CONFIG, rounding), named)
    logits, trace = jax.device_get(check_parity._forward(model, ids[None], None))
    a = {f"w/{name}": value for name, value in named.items()}
    a |= {"ids": ids, "logits": logits[0]}
    for i, layer in enumerate(trace):
      a[f"cap/layer{i}.x_out"], a[f"cap/layer{i}.pre_out"] = layer["x_out"][0], layer["pre_out"][0]
      a[f"cap/layer{i}.window_kv"] = layer["window_kv"][0, -4:]
      if i:
        a[f"cap/layer{i}.topk"] = layer["topk"][0]
    entries = trace[1]["entries"]
    a["cap/layer1.compress_kv"] = entries.kv[0, : LENGTH // 2]
    a["cap/layer1.index_k"] = entries.index_keys[0, : LENGTH // 2]
    a["cap/layer1.index_scores"] = trace[1]["index_scores"][0, :, : LENGTH // 2]
    arrays[rounding] = a
  loss, grads = jax.device_get(check_parity._gradient(model, ids[None], None))
  arrays["gradients"] = {"loss": loss} | {
      f"g/{name}": value for name, value in released.to_released(grads, model.config).items()
  }
  return arrays


@pytest.fixture
def check(tmp_path, capsys):
  """Returns `check(arrays, *flags, args=...)`: status, the JSON or None, standard error."""

  def run(arrays, *flags, args=OFFICIAL):
    np.savez(tmp_path / "golden.npz", **arrays)
    (tmp_path / "args.json").write_text(json.dumps({"args": args}))
    paths = [f"--golden={tmp_path / 'golden.npz'}", f"--args={tmp_path / 'args.json'}"]
    return report(check_parity.main([*paths, "--json", *flags]), capsys)

  return run


def report(status, capsys):
  out, err = capsys.readouterr()
  return status, json.loads(out.splitlines()[-1]) if out else None, err


@pytest.mark.parametrize("rounding", [(), ALL], ids=["plain", "rounded"])
def test_another_model_agrees_and_its_rounding_is_recognised(check, stored, rounding):
  status, found, err = check(stored[rounding])
  assert (status, err, found["exceeded"]) == (0, "", [])
  assert found["quantize"] == list(rounding)
  assert found["logits_max_abs"] == found["streams_max_abs"] == found["kv_max_abs"] == 0.0
  assert found["kv_max_abs"] is not False
  assert found["topk_sets_equal"] is True
  absent = ("decode_logits_max_abs", "pool_equal", "engram_ids_equal", "grads_max_rel", "replay")
  assert all(found[key] is None for key in absent)


@pytest.mark.parametrize("rounding", [(), ALL], ids=["plain", "rounded"])
def test_rounding_is_recognised_by_logits_alone(check, stored, rounding):
  kept = {k: v for k, v in stored[rounding].items() if not k.startswith("cap/")}
  status, found, _ = check(kept)
  assert status == 0
  assert found["quantize"] == list(rounding)


@pytest.mark.parametrize(
    ("key", "at", "value", "figure"),
    [
        ("logits", (5, 3), 1e-4, "logits_max_abs"),
        ("logits", (5, 3), np.nan, "logits_max_abs"),
        ("cap/layer1.x_out", (12, 3, 1), 3e-4, "streams_max_abs"),
        ("cap/layer1.pre_out", (0, 1), 3e-4, "streams_max_abs"),
        ("cap/layer0.window_kv", (0, 0), 1e-3, "kv_max_abs"),
        ("cap/layer1.compress_kv", (5, 31), 1e-3, "kv_max_abs"),
        ("cap/layer1.index_k", (5, 31), 1e-3, "kv_max_abs"),
        ("cap/layer1.index_scores", (4, 0), -np.inf, "index_scores_max_abs"),
        ("cap/layer1.topk", (12, 0), 1, "topk_sets_equal"),
    ],
)
def test_a_changed_element_is_found_and_named(check, stored, key, at, value, figure):
  changed = stored[()][key].copy()
  changed[at] = value if np.isinf(value) else changed[at] + value
  status, found, err = check(stored[()] | {key: changed})
  assert status == 1
  assert found["exceeded"] == [key]
  assert key in err
  json.dumps(found, allow_nan=False)
  others = {k: v for k, v in found.items() if k.endswith(("abs", "rel", "equal")) and k != figure}
  assert not found[figure] or found[figure] > 1e-5
  assert all(v in (None, True) or v < 1e-5 for v in others.values())


def test_order_and_padding_of_a_selection_do_not_matter(check, stored):
  topk = np.pad(stored[()]["cap/layer1.topk"][:, ::-1], ((0, 0), (2, 0)), constant_values=-1)
  assert check(stored[()] | {"cap/layer1.topk": topk})[1]["topk_sets_equal"] is True


def test_gradients_are_those_of_the_run_without_rounding(check, stored):
  status, found, err = check(stored[ALL] | stored["gradients"])
  assert (status, err, found["quantize"]) == (0, "", list(ALL))
  assert found["grads_max_rel"] == found["loss_abs"] == found["logits_max_abs"] == 0.0

  key = "g/layers.1.attn.wkv.weight"
  status, found, err = check(
      stored[()] | stored["gradients"] | {key: stored["gradients"][key] * 1.01}
  )
  assert (status, found["exceeded"]) == (1, [key])
  assert key in err


@pytest.mark.parametrize("error", [0.99e-3, 1.01e-3])
def test_the_gradient_limit_is_a_thousandth_of_the_maximum_plus_a_millionth(error):
  want = np.array([0.0, -7.0, 2.0])
  got = want + [error * 7 + 1e-6 * error / 1e-3, 0, 0]
  relative = check_parity.max_abs(got, want, "g") / (np.abs(want).max() + 1e-3)
  assert (relative <= check_parity.GRADIENT_LIMIT) == (error < 1e-3)


@pytest.fixture(scope="module")
def resumed(stored):
  """Decode, arms and simulations of the other model, as a golden file holds them."""
  plain = stored[()]
  description = {
      "prompt_len": np.array(10), "window": np.array(4), "cached_lengths": np.array([3, 8]),
      "sim_prompt_lengths": np.array([2, 10]),
  }  # fmt: skip
  tensors = {key[2:]: value for key, value in plain.items() if key.startswith("w/")}
  case = files.Case(plain | description, CONFIG, tensors, plain["ids"][None], None, None, True)
  runs = served.Runs(case, released.load(check_parity._shapes(CONFIG, ()), tensors))
  with jax.default_matmul_precision("highest"):
    arrays = {"decode_logits_from9": runs.decoded(9)}
    arrays |= {k: v for k, v in runs.arms() if k[:4] not in ("armC", "armE")}
    arrays |= dict(runs.simulated())
  return plain | description | {k: v[0] if np.ndim(v) else v for k, v in arrays.items()}


@pytest.mark.slow
def test_decode_and_every_arm_are_run(check, resumed):
  status, found, err = check(resumed)
  assert (status, err, found["exceeded"]) == (0, "", [])
  assert found["decode_logits_max_abs"] == 0.0
  assert found["replay"].keys() == {"A", "B", "C", "D", "E", "simB", "simD"}
  assert max(found["replay"].values()) < 1e-5
  assert found["kv_max_abs"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "at", "arms"),
    [
        ("decode_logits_from9", (2, 3), ""),
        ("armA_logits", (0, 3), "A E"),
        ("armB_logits", (3, 3), "B C"),
        ("armD_c8_logits", (1, 3), "D"),
        ("armD_c3_logits", (0, 0), "D"),
        ("simB_p2_logits", (4, 3), "simB"),
        ("simD_c8_logits", (0, 3), "simD"),
        ("armA_kv1", (4, 31), ""),
        ("armD_c8_new_index_k1", (0, 31), ""),
        ("armD_c8_replay_window_kv", (0, 0, 0), ""),
        ("armD_c8_floor", (), ""),
    ],
)
def test_a_changed_element_of_an_arm_is_found_and_named(check, resumed, key, at, arms):
  changed = resumed[key].copy()
  changed[at] += 1
  status, found, err = check(resumed | {key: changed})
  assert status == 1
  assert key in err
  wrong = {arm for arm, value in found["replay"].items() if value > 5e-5}
  assert wrong == set(arms.split())
  assert (found["decode_logits_max_abs"] > 5e-5) == key.startswith("decode")
  # Arms C and E stand under their own names, each for all hits.
  names = {"A": ["armE"], "B": ["armC"]}.get(arms[:1], []) if len(arms) > 1 else []
  assert {name for name in found["exceeded"] if name != key} == {
      name for name in found["exceeded"] if name[:4] in names
  }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("decode_logits_from13", np.zeros((0, 20)), "decode must start within 1..12"),
        ("prompt_len", np.array(13), "prompt_len is 13; "),
        ("cached_lengths", np.array([11]), "each must be within 1..10"),
        ("window", np.array(8), "window is 8; the configuration has 4"),
        ("armB_logits", np.zeros((2, 20)), "armB_logits has shape"),
    ],
)
def test_arms_that_cannot_be_run_are_bad_content(check, resumed, key, value, says):
  status, found, err = check(resumed | {key: value})
  assert (status, found) == (2, None)
  assert says in err


def drop(name):
  return lambda arrays: {k: v for k, v in arrays.items() if k != name}


@pytest.mark.parametrize(
    ("change", "args", "says"),
    [
        (drop("ids"), OFFICIAL, "ids is missing"),
        (lambda a: a | {"ids": np.full(LENGTH, 20)}, OFFICIAL, "token id 20"),
        (lambda a: a | {"ids": np.full(LENGTH, 1.0)}, OFFICIAL, "ids is float64"),
        (lambda a: a | {"ids": np.zeros(LENGTH + 1, np.int32)}, OFFICIAL, "has shape"),
        (lambda a: a | {"logits": a["logits"][:, :-1]}, OFFICIAL, "logits has shape"),
        (lambda a: a | {"cap/layer0.topk": a["cap/layer1.topk"]}, OFFICIAL, "layer 0 "),
        (lambda a: a | {"cap/layer9.x_out": a["cap/layer1.x_out"]}, OFFICIAL, "layer 9 "),
        (drop("w/norm.weight"), OFFICIAL, "norm.weight is missing"),
        (lambda a: a | {"w/nonsense": np.ones(3)}, OFFICIAL, "nonsense has no place"),
        (lambda a: {"ids": a["ids"], "logits": a["logits"]}, OFFICIAL, "--weights"),
        (lambda a: {k: a[k] for k in a if k[:2] == "w/" or k == "ids"}, OFFICIAL, "nothing"),
        (dict, OFFICIAL | {"hidden": 3}, "hidden"),
        (dict, {k: v for k, v in OFFICIAL.items() if k != "dim"}, "hidden_size is missing"),
        (dict, OFFICIAL | {"dim": "32"}, "hidden_size must be int"),
        (dict, [1], "args is [1]"),
    ],
)
def test_bad_content_ends_with_status_2_and_one_sentence(check, stored, change, args, says):
  status, found, err = check(change(stored[()]), args=args)
  assert (status, found) == (2, None)
  assert says in err
  assert err.count("\n") == 1


def test_bad_files_and_flags_end_with_status_2(tmp_path, capsys):
  (tmp_path / "text.npz").write_text("no archive")
  (tmp_path / "broken.json").write_text("{")
  whole = pathlib.Path(WEIGHTS).read_bytes()
  (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
  np.save(tmp_path / "array.npy", np.ones(3))
  shutil.move(tmp_path / "array.npy", tmp_path / "array.npz")
  np.savez(tmp_path / "objects.npz", ids=np.array([{}]))
  names = ("absent.npz", "text.npz", "cut.npz", "array.npz", "objects.npz")
  golden = [[f"--golden={tmp_path / name}", f"--args={ARGS}"] for name in names]
  args = [[f"--golden={WEIGHTS}", f"--args={tmp_path / n}"] for n in ("absent.json", "broken.json")]
  other = [[], [f"--golden={WEIGHTS}"], [f"--golden={WEIGHTS}", f"--args={ARGS}", "--nonsense"]]
  for argv in (*golden, *args, *other):
    assert check_parity.main(argv) == 2, argv
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err


def test_both_names_of_the_configuration_mean_one_model(tmp_path):
  root = json.loads(pathlib.Path(ARGS).read_text())
  (tmp_path / "args.json").write_text(json.dumps({"args": root["args"]}))
  assert files.read_config(tmp_path / "args.json") == files.read_config(ARGS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rounding", "keys", "arms"),
    [
        ("model_f32", (), "logits decode streams kv topk pool engram index", ""),
        ("model_f32_quant", ALL, "logits decode streams kv topk pool engram index", ""),
        ("grads_f32", (), "grads loss global", ""),
        ("replay_f32", (), "logits kv", "A B C D E simB simD"),
    ],
)
def test_golden_files_agree(name, rounding, keys, arms, capsys):
  argv = [f"--golden={GOLDEN / name}.npz", f"--args={ARGS}", f"--weights={WEIGHTS}", "--json"]
  status, found, _ = report(check_parity.main(argv), capsys)
  assert (status, found["exceeded"], found["quantize"]) == (0, [], list(rounding))
  figures = {k: v for k, v in found.items() if k.endswith(("_abs", "_rel", "_equal"))}
  assert {k.split("_")[0] for k, v in figures.items() if v is not None} == set(keys.split())
  assert all(v in (None, True) or v < 3e-4 for v in figures.values())
  replays = found["replay"] or {}
  assert replays.keys() == set(arms.split())
  assert max(replays.values(), default=0.0) < 5e-5
