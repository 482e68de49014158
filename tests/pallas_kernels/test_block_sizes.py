"""Block sizes, and the chips that they are made for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.block_sizes import BlockSizes, current_chip
from pallas_kernels.chips import CHIPS, of_kind

MIB = 1 << 20


@given(
    units=st.integers(1, 300),
    unit=st.sampled_from([8, 128, 1024]),
    bytes_per_row=st.integers(1, 4096),
    fixed=st.integers(0, 8 * MIB),
    budget=st.integers(1, 64 * MIB),
)
def test_a_block_divides_the_rows_and_fits_or_is_refused(units, unit, bytes_per_row, fixed, budget):
  rows = units * unit
  make = lambda: BlockSizes.largest("k", rows, unit, bytes_per_row, fixed, budget)
  need = lambda n: 2 * n * bytes_per_row + fixed + 4 * MIB
  if need(unit) > budget:
    with pytest.raises(ValueError, match=rf"k: {unit} rows .* the budget is {budget}"):
      make()
    return
  found = make()
  assert rows % found.rows == found.rows % unit == 0
  assert found.vmem_bytes == need(found.rows) <= budget
  larger = [n * unit for n in range(1, units + 1) if units % n == 0 and n * unit > found.rows]
  assert all(need(n) > budget for n in larger)


def test_half_of_the_smallest_vmem_is_the_budget_off_a_tpu():
  assert current_chip() == CHIPS["v5e"]
  assert BlockSizes.largest("k", 1 << 20, 8, 1024).vmem_bytes <= 64 * MIB


def test_a_block_has_an_end():
  assert BlockSizes.largest("k", 4096, 8, 4, at_most=1000).rows == 512


@pytest.mark.parametrize("rows", [0, 12, -8])
def test_rows_that_are_no_units_are_refused(rows):
  with pytest.raises(ValueError, match=f"k: {rows} rows; allowed are positive multiples of 8"):
    BlockSizes.largest("k", rows, 8, 4)


def test_rooflines_are_those_of_the_peaks():
  v6e = CHIPS["v6e"]
  assert v6e.roofline_cycles(1640e9) == pytest.approx(1.751e9)
  assert v6e.roofline_cycles(0, 918e12) == pytest.approx(1.751e9)
  assert v6e.roofline_cycles(937, 1e9) == pytest.approx(1e9 / (918e12 / 1.751e9))


@pytest.mark.parametrize(
    ("kind", "name"), [("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU7x", "tpu7x")]
)
def test_kinds_of_jax_are_known(kind, name):
  assert of_kind(kind).name == name


def test_an_unknown_kind_is_refused():
  with pytest.raises(ValueError, match="device kind is 'TPU v4'; kernels are made for 'TPU v5"):
    of_kind("TPU v4")
