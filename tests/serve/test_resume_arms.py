"""The five arms over shared beginnings, and the statistics of their answers."""

import jax
import numpy as np
import pytest

from deepseek_jax.eval.resume import Arms, Prompts, accuracy, answered, flips, mean
from deepseek_jax.serve import replay

W, C = 4, 20


@pytest.fixture(scope="module", params=[2, 9])
def found(request, served, quick_compile):
  """Logits of two beginnings with three rests each, shorter and longer than the window."""
  rests = request.param
  ids = served.ids(C + rests, lines=6)
  beginnings = ids[:2, :C]
  model = served.model()
  arms = Arms(model, served.classes, served.pad_class)
  with jax.default_matmul_precision("highest"):
    logits = arms.logits(beginnings, ids[:, C:].reshape(2, 3, rests))
    prompts = np.concatenate([np.repeat(beginnings, 3, axis=0), ids[:, C:]], axis=1)
    n, read = C + rests, served.reader(model)
    alone = {
        arm: read.prefill(served.cache(model, lines=6), list(prompts), [plan] * 6)[1]
        for arm, plan in (("A", replay.exact(n)), ("B", replay.cold(n, W)))
    }
  return logits, alone


@pytest.mark.slow
def test_shared_beginnings_change_no_arm(found):
  logits, alone = found
  for arm, expected in alone.items():
    np.testing.assert_allclose(logits[arm].reshape(6, -1), expected, atol=1e-5, rtol=0)
  np.testing.assert_allclose(logits["E"], logits["A"], atol=1e-5, rtol=0)
  np.testing.assert_allclose(logits["C"], logits["B"], atol=1e-5, rtol=0)
  assert np.abs(logits["D"] - logits["C"]).max() > 1e-3
  assert np.abs(logits["B"] - logits["A"]).max() > 1e-3


@pytest.mark.parametrize("cached", [W, C + 1])
def test_a_boundary_that_is_no_hit_is_refused(served, cached):
  arms = Arms(served.model(), served.classes, served.pad_class)
  with pytest.raises(ValueError, match="a hit has a multiple of 2 and more than 4"):
    arms.logits(served.ids(cached, lines=1), served.ids(3, lines=1)[None])


def test_statistics_of_known_answers():
  share, low, high = accuracy(np.arange(100) < 90)
  assert share == 0.9
  np.testing.assert_allclose((low, high), (0.8256, 0.9448), atol=1e-4)  # Wilson, by hand
  values = np.array([1, 2, 3, 2], np.float32)
  assert mean(values) == pytest.approx((2.0, np.std(values, ddof=1) / 2))
  rng = np.random.default_rng(0)
  base = rng.standard_normal((5, 10, 8)).astype(np.float32)
  answers = base.argmax(-1)
  prompts = Prompts(np.zeros((5, 4), int), np.zeros((5, 10, 2), int), answers, answers)
  worse = base.copy()
  worse.reshape(-1, 8)[:6] = -base.reshape(-1, 8)[:6]
  found = answered({"A": base, "B": base, "C": base, "D": worse, "E": base}, prompts)
  a, b, c, d, _ = found.right
  assert a.all()
  assert flips(a, b) == (0, 0, 1.0)
  assert flips(c, d) == (0, 6, 2 * 0.5**6)
  assert flips(d, c) == (6, 0, 2 * 0.5**6)
  log_p = jax.nn.log_softmax(base.reshape(-1, 8))
  np.testing.assert_allclose(found.nll[0], -log_p.max(-1), atol=1e-6)
  np.testing.assert_allclose(found.kl[0], 0, atol=1e-7)
  assert (found.kl[1, :6] > 0).all()
  np.testing.assert_allclose(found.kl[1, 6:], 0, atol=1e-7)
  np.testing.assert_array_equal(found.noise, 0)
