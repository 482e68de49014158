"""The five arms over shared beginnings, and the statistics of their answers."""

import jax
import numpy as np
import pytest

from deepseek_jax.eval.resume import Arms, accuracy, difference
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
  rng = np.random.default_rng(0)
  base = rng.standard_normal((50, 8)).astype(np.float32)
  answers = base.argmax(-1)
  same = difference(base, base, answers)
  assert same[:3] == (0, 0, 1.0)
  assert same.kl == same.nll == (0.0, 0.0)
  other = base.copy()
  other[:6] = -base[:6]
  lost = difference(base, other, answers)
  assert (lost.gained, lost.lost) == (0, 6)
  assert lost.p == 2 * 0.5**6
  assert lost.kl[0] > 0
  assert lost.nll[0] > 0
