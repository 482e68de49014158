"""Learning rate by step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.train.learning_rate import learning_rate_schedule

# Compiles in less than half the time; the arrays are too small to notice the slower code.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("constant", {0: 0.0, 5: 0.5, 10: 1.0, 450: 1.0, 10_000: 1.0}),
        ("cosine", {0: 0.0, 5: 0.5, 10: 1.0, 230: 0.55, 450: 0.1, 10_000: 0.1}),
        ("report", {0: 0.0, 5: 0.5, 10: 1.0, 280: 1.0, 340: 0.55, 400: 0.1, 10_000: 0.1}),
    ],
)
def test_schedule_values(kind, values):
  schedule = quick_jit(learning_rate_schedule(kind, 2.6e-4, 10, 450, 0.1))
  for step, value in values.items():
    got = schedule(jnp.asarray(step, jnp.int32))
    np.testing.assert_allclose(got, 2.6e-4 * value, rtol=1e-5, atol=1e-12, err_msg=str(step))


def test_schedules_may_start_at_the_peak():
  for kind in ("constant", "cosine", "report"):
    assert learning_rate_schedule(kind, 1.0, 0, 45, 0.0)(0) == 1.0


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("kind", ("linear", 1.0, 1, 10, 0.1)),
        ("peak", ("cosine", 0.0, 1, 10, 0.0)),
        ("final", ("cosine", 1.0, 1, 10, 2.0)),
        ("warmup_steps", ("report", 1.0, 30, 45, 0.1)),
        ("warmup_steps", ("constant", 1.0, -1, 45, 0.1)),
        ("total_steps", ("cosine", 1.0, 10, 10, 0.1)),
    ],
)
def test_schedules_refuse_impossible_numbers(field, arguments):
  with pytest.raises(ValueError, match=field):
    learning_rate_schedule(*arguments)
