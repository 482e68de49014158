"""The decode kernel against the definition, in the interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantize import formats
from pallas_kernels.quantize import op as quantize
from pallas_kernels.sparse_attention import kernel, layout, op, reference

H, ENTRIES, TOLERANCE = 512, 48, {jnp.float32: 2e-5, jnp.bfloat16: 8e-3}

interpreted = functools.partial(
    pltpu.force_tpu_interpret_mode,
    pltpu.InterpretParams(
        detect_races=True,
        uninitialized_memory="nan",
        out_of_bounds_reads="raise",
        dma_execution_mode="on_wait",
    ),
)


packed = jax.jit(quantize.quantize, static_argnums=1)


def words_of(codes, bits):
  fields = np.asarray(codes).astype(np.uint32)
  fields = fields.reshape(*fields.shape[:-1], -1, 32 // bits) << np.arange(0, 32, bits, np.uint32)
  return fields.sum(axis=-1, dtype=np.uint32).view(np.int32)


@functools.cache
def random_entries():
  return packed_entries(np.random.default_rng(7).normal(size=(ENTRIES, H)).astype(np.float32))


def packed_entries(x):
  codes, scales = packed(jnp.asarray(x), formats.FP4_MAIN)
  slots = jnp.arange(x.shape[0])
  words = (jnp.asarray(words_of(a, bits)) for a, bits in ((codes, 4), (scales, 8)))
  return np.array(layout.to_stored(*words, slots))


def packed_window(x):
  codes, scales = packed(jnp.asarray(x), formats.FP8_WINDOW)
  b, w, _ = x.shape
  return words_of(codes, 8), words_of(scales, 8).reshape(b, w // 32, 128)


def case(dtype, b=2, n=16, k=32, w=64, seed=0):
  """Requests with absent and repeated entries, the first and the last of the table among them."""
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  slots = rng.integers(0, ENTRIES, (b, k)).astype(np.int32)
  slots[rng.random((b, k)) < 0.3] = -1
  slots[0, :6] = 0, ENTRIES - 1, ENTRIES - 1, 15, 16, -1
  slots[0, k // 2 : k // 2 + 4] = ENTRIES - 1, 31, 0, 15
  window, scales = packed_window(normal(b, w, H))
  return dict(
      q=jnp.asarray(normal(b, n, H), dtype),
      entries=random_entries().copy().reshape(-1, 128),
      slots=slots,
      window=window,
      window_scales=scales,
      seen=(rng.random((b, w)) < 0.6).astype(np.int32),
      sink=normal(n),
  )


def run(arguments, implementation, **options):
  arguments = {name: jnp.asarray(a) for name, a in arguments.items()}
  options["implementation"] = implementation
  attend = jax.jit(functools.partial(op.sparse_attention_decode, **options))
  if implementation == "reference":
    return np.asarray(attend(**arguments).astype(jnp.float32))
  with interpreted():
    return np.asarray(attend(**arguments).astype(jnp.float32))


def test_a_stored_entry_has_the_same_words_in_another_order():
  slots = jnp.arange(40)
  codes, scales = (
      jnp.arange(40 * n, dtype=jnp.int32).reshape(40, n) + at for n, at in ((64, 0), (8, 10**6))
  )
  stored = layout.to_stored(codes, scales, slots)
  for got, want in zip(layout.from_stored(stored, slots), (codes, scales)):
    np.testing.assert_array_equal(got, want)
  # Every word that a lane of the kernel takes without moving: code w at a lane that is w modulo 64.
  lane = (72 * np.arange(40)[:, None] + np.arange(72)) % 128
  is_code = np.asarray(stored) < 10**6
  np.testing.assert_array_equal(lane[is_code] % 64, np.asarray(stored)[is_code] % 64)
  assert np.all(lane[~is_code] < 64)
  assert layout.to_stored(codes[:, :8], scales[:, :1], slots).shape == (40, 9)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_reference_is_attention_over_decoded_keys(dtype):
  a = case(dtype)
  entries = reference.read_entries(jnp.asarray(a["entries"]), jnp.arange(ENTRIES)[None], H)[0]
  window = reference.read_window(jnp.asarray(a["window"]), jnp.asarray(a["window_scales"]), 64, H)
  q = np.asarray(a["q"].astype(jnp.float32))
  for b in range(2):
    keys = np.concatenate(
        [window[b][a["seen"][b] != 0], entries[a["slots"][b][a["slots"][b] >= 0]]]
    )
    e = np.exp(q[b] @ keys.T * H**-0.5)
    want = e @ keys / (e.sum(-1) + np.exp(a["sink"]))[:, None]
    np.testing.assert_allclose(run(a, "reference")[b], want, atol=TOLERANCE[dtype])


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "requests"), [(jnp.float32, 3), (jnp.bfloat16, 5)])
def test_kernel_is_the_reference_and_reads_nothing_else(dtype, requests):
  a = case(dtype, b=requests)
  want = run(a, "reference")
  entries = a["entries"].reshape(ENTRIES, 72)
  unread = np.setdiff1d(np.arange(ENTRIES), a["slots"])
  entries[unread] = 0x7F7F7F7F  # all scales NaN
  hidden = a["seen"] == 0
  a["window_scales"].reshape(requests, 64, 4)[hidden] = -1  # all scales NaN
  a["window"][hidden] = 0x7F7F7F7F
  np.testing.assert_allclose(run(a, "pallas"), want, atol=TOLERANCE[dtype])


@pytest.mark.slow
def test_generations_without_bf16_arithmetic_give_the_same_bits(monkeypatch):
  a = case(jnp.bfloat16)
  found = []
  for packed, cores, ahead, share in ((True, 1, True, 0.3), (False, 2, False, 0.6)):
    blocks = kernel.Blocks(packed, False, cores, ahead, (((share, 0.5), (0.8, share)),) * 2)
    monkeypatch.setattr(kernel, "blocks_for", lambda *_, blocks=blocks, **__: blocks)
    found.append(run(a, "pallas"))
  np.testing.assert_array_equal(*found)


@pytest.mark.slow
def test_rows_without_keys_give_zero_and_a_nan_entry_stays_nan():
  a = case(jnp.float32, b=4, w=128)
  a["slots"][1], a["seen"][1] = -1, 0  # nothing
  a["slots"][2] = -1  # only the window
  a["seen"][3] = 0  # only entries
  # Absent slots read entry 0 as well, and must not let it through.
  a["slots"][a["slots"] == 0] = 6
  a["slots"][0, 9] = 0
  x = np.zeros((ENTRIES, H), np.float32)
  x[:, 3] = np.nan
  a["entries"].reshape(ENTRIES, 72)[0] = packed_entries(x)[0]
  want, got = run(a, "reference"), run(a, "pallas")
  assert np.isnan(want[0]).any()
  np.testing.assert_allclose(got, want, atol=2e-5)
  assert np.all(got[1] == 0)
  assert np.abs(got[2]).max() > 0
  assert np.abs(got[3]).max() > 0


@pytest.mark.parametrize(
    "implementation", ["reference", pytest.param("pallas", marks=pytest.mark.slow)]
)
def test_channels_in_the_order_of_planes(implementation):
  a = case(jnp.float32)
  want = run(a, "reference")[..., layout.CHANNELS]
  a["q"] = a["q"][..., layout.CHANNELS]
  np.testing.assert_allclose(run(a, implementation, channels="planes"), want, atol=2e-5)


def test_another_order_of_channels_is_refused():
  with pytest.raises(
      ValueError, match="channels is 'words' for 512 of them; allowed are 'natural'"
  ):
    run(case(jnp.float32), "reference", channels="words")


def test_one_table_a_request_is_one_table_of_all():
  a = case(jnp.float32)
  want = run(a, "reference")
  shared = a["entries"]
  other = packed_entries(np.ones((ENTRIES, H), np.float32)).reshape(-1, 128)
  a["entries"] = np.stack([shared, other])
  got = run(a, "reference")
  np.testing.assert_allclose(got[0], want[0], atol=1e-6)
  assert np.abs(got[1] - want[1]).max() > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=jnp.zeros((2, 16, 512), jnp.float16)), "q has dtype float16; allowed are float32"),
        (
            dict(entries=np.zeros((3, 27, 128), np.int32)),
            r"are \[R, 128\] and \[2, R, 128\]",
        ),
        (dict(entries=np.zeros((28, 128), np.int32)), "multiple of the 72 words"),
        (dict(window=np.zeros((2, 63, 128), np.int32)), "64 slots of 128 words fill 64"),
        (dict(sink=np.zeros(16, np.float16)), "sink has dtype float16"),
    ],
)
def test_bad_input_is_refused(change, message):
  with pytest.raises(ValueError, match=message):
    run({**case(jnp.float32), **change}, "reference")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(n=8), "q has 8 heads; the kernel takes multiples of 16"),
        (dict(k=40), "slots has 40 entries a row; the kernel takes multiples of 32 up to 512"),
        (dict(k=544), "slots has 544 entries a row"),
        (dict(w=32), "seen has 32 slots"),
    ],
)
def test_sizes_that_the_kernel_cannot_take_are_refused(sizes, message):
  a = case(jnp.float32, **sizes)
  with pytest.raises(ValueError, match=message):
    run(a, "pallas")


def test_the_kernel_is_refused_off_tpu():
  arguments = {name: jnp.asarray(a) for name, a in case(jnp.float32).items()}
  with pytest.raises(ValueError, match="implementation='pallas' on cpu"):
    op.sparse_attention_decode(**arguments, implementation="pallas")
