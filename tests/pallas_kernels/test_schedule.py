"""Static schedules: known loops, recorded for all generations, executed word by word.

`data/schedules.json.xz` holds the compiler's texts of the kernels in `loops.py` (jax 0.10.2, libtpu
0.0.42.1). The expected cycles were found by an interpreter that shares no code with this one.
"""

import json
import lzma
import pathlib

import numpy as np
import pytest

from pallas_kernels import schedule
from pallas_kernels.aot import GENERATIONS
from pallas_kernels.scalar_unit import UNKNOWN, Loop, execute
from pallas_kernels.schedule import ISSUE, LATENCY

KINDS = (ISSUE, LATENCY)

# Cycles of issue and with latencies, for v5e, v5p, v6e and TPU7x.
EXPECTED = {
    "fori1": ((13, 13), (38, 54), (23, 29), (17, 22)),
    "fori10": ((91, 91), (115, 129), (100, 104), (111, 113)),
    "fori512": ((4107, 4107), (4131, 4145), (4116, 4120), (5131, 5133)),
    "nested": ((1397, 1397), (1421, 1436), (1406, 1411), (1747, 1750)),
    "grid": ((787, 827), (947, 1069), (849, 981), (625, 661)),
    "parallel": ((787, 827), (548, 694), (849, 981), (625, 661)),
    "rows": ((39852, 54301), (41095, 55556), (38680, 53133), (33848, 60364)),
}


@pytest.fixture(scope="module")
def recorded():
  file = pathlib.Path(__file__).parent / "data" / "schedules.json.xz"
  texts = json.loads(lzma.decompress(file.read_bytes()))
  return lambda generation, case, kind=LATENCY: texts[f"{generation}/{case}/{kind}"]


@pytest.fixture
def run(recorded):
  def run(generation, case, kind=LATENCY, **options):
    text = schedule.read(recorded(generation, case, kind), generation)
    return execute(text, {0: [300]} if case == "rows" else None, **options)

  return run


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("case", EXPECTED)
def test_cycles_agree_with_another_interpreter(run, generation, case):
  found = tuple(run(generation, case, kind).cycles for kind in KINDS)
  assert found == EXPECTED[case][GENERATIONS.index(generation)]


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("kind", KINDS)
class TestLoops:

  def test_a_turn_costs_its_body(self, run, generation, kind):
    ten, many = run(generation, "fori10", kind), run(generation, "fori512", kind)
    (loop,) = many.loops
    assert (loop.entries, loop.iterations) == (1, 512)
    assert many.cycles - ten.cycles == 502 * loop.body

  def test_inner_loops_are_entered_once_a_turn(self, run, generation, kind):
    outer, inner = sorted(run(generation, "nested", kind).loops, key=lambda one: one.header)
    assert (outer.entries, outer.iterations) == (1, 7)
    assert (inner.entries, inner.iterations) == (7, 7 * 24)

  def test_a_grid_moves_every_block_once(self, run, generation, kind):
    found = run(generation, "grid", kind)
    block = 4 * 64 * 512
    # On TPU7x the argument is small enough to be in VMEM before the kernel starts.
    reads = 0 if generation == "tpu7x" else 8
    assert found.dmas.get("hbm_to_vmem", 0) == reads
    assert found.dmas["vmem_to_hbm"] == 8
    assert found.dma_bytes["vmem_to_hbm"] == 8 * block
    assert found.hbm_bytes == (8 + reads) * block

  def test_words_are_counted_as_often_as_they_run(self, run, generation, kind):
    found = run(generation, "nested", kind)
    assert found.passes.sum() == found.cycles
    assert found.passes.max() == 7 * 24


@pytest.mark.parametrize("generation", GENERATIONS)
def test_prefetched_scalars_decide_how_many_rows_are_copied(recorded, generation):
  text = schedule.read(recorded(generation, "rows"), generation)
  for count in (1, 7, 512):
    found = execute(text, {0: [count], 1: np.arange(512)})
    assert found.dmas["hbm_to_vmem"] == 4 * count
    assert found.dma_bytes["hbm_to_vmem"] == 4 * count * 512
    assert not found.defaulted
  assert "hbm_to_vmem" not in execute(text).dmas


def test_both_cores_of_a_v5p_share_a_parallel_grid(recorded):
  text = schedule.read(recorded("v5p", "parallel"), "v5p")
  halves = [execute(text, core=core) for core in (0, 1)]
  assert [half.dmas["hbm_to_vmem"] for half in halves] == [4, 4]
  alone = schedule.read(recorded("v5p", "grid"), "v5p")
  assert execute(alone, core=1).dmas == {}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_program_tells_how_often_it_calls_a_kernel(run, generation):
  calls = run(generation, "scanned", unwritten=UNKNOWN).calls
  assert {n for name, n in calls.items() if name.startswith("fori10")} == {5}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_units_have_a_row_for_every_emitted_word(recorded, run, generation):
  units = schedule.read_units(recorded(generation, "grid", "units"))
  found = run(generation, "grid", ISSUE)
  assert units.used.shape == (len(found.passes), len(units.names))
  assert (units.used <= units.capacity).all()
  stored = (found.passes @ units.used)[units.names.index("VSTORE")]
  assert stored == 8 * 64 * 512 // 1024


HEADER = "= control target key start\nLH: loop header\n= control target key end\n\n"


def text_of(*words):
  address = lambda i: f"{i:#x}" if i else "0"
  lines = [f"{address(i)}   :  {{ {word} }}" for i, word in enumerate(words)]
  return HEADER + "\n".join(lines)


class TestInstructions:

  def registers(self, *words):
    """Trips of a loop whose last word's register s9 decides: 1 + its value."""
    loop = (
        "%s1_s8 = smov 0",
        "%s2_s8 = sadd.s32 1, %s1_s8",
        "%p3_p9 = scmp.gt.s32.totalorder %s2_s8, %s4_s9",
        "%5 = sbr.rel (!%p3_p9) target bundleno = {} (0x0), region = 1",
        *[""] * 4,
    )
    start = len(words) + 1
    loop = [word.format(start) for word in loop]
    found = execute(schedule.read(text_of(*words, *loop), "v6e"))
    return found.loops[0].iterations - 1 if found.loops else 0

  @pytest.mark.parametrize(
      ("instruction", "value"),
      [
          ("ssub.s32 12, 5", 7),
          ("smul.u32 3, 4", 12),
          ("sshll.u32 3, 2", 12),
          ("sshrl.u32 4294967295, 28", 15),
          ("sshra.s32 4294967264, 2", -8 + 8),
          ("sand.u32 13, 6", 4),
          ("sor.u32 9, 4", 13),
          ("sxor.u32 9, 8", 1),
          ("sadd.s32 4294967295, 6", 5),
          ("smin.u32 4294967295, 6", 6),
          ("smax.s32 4294967295, 6", 6),
          ("smulhi.u32 2147483648, 8", 4),
          ("scalar_lea.smem 5, 6", 11),
      ],
  )
  def test_arithmetic_is_of_32_bits(self, instruction, value):
    assert self.registers(f"%s0_s9 = {instruction}") == value

  def test_a_word_reads_what_stood_before_it(self):
    swap = "%s0_s9 = smov %s1_s7  ;;  %s2_s7 = smov %s3_s9"
    assert self.registers("%s0_s9 = smov 3  ;;  %s1_s7 = smov 5", swap) == 5

  def test_predicates(self):
    compare = "%p0_p1 = scmp.eq.s32.totalorder 1, 1"
    assert self.registers("%s0_s9 = smov 2", compare, "%s0_s9 = smov (%p0_p1), 6") == 6
    assert self.registers("%s0_s9 = smov 2", compare, "%s0_s9 = smov (!%p0_p1), 6") == 2
    select = "%s0_s9 = smov (!%p0_p1, %s1_s7), 6"
    assert self.registers("%s1_s7 = smov 4", compare, select) == 4

  def test_smem_keeps_what_is_stored(self):
    store = "%1 = sst [smem:[#allocation3 + $0x2]] %s0_s7"
    load = "%s2_s9 = sld [smem:[#allocation3 + %s3_s6]]"
    assert self.registers("%s0_s7 = smov 9  ;;  %s3_s6 = smov 2", store, load) == 9

  def test_what_a_vector_decides_is_reported(self):
    popped = "%s0_s9 = spop %1"
    text = text_of(
        popped, "%p1_p1 = scmp.gt.s32.totalorder %s0_s9, 3",
        "%2 = sbr.rel (%p1_p1) target bundleno = 0 (0x0), region = 1", *[""] * 4,
    )  # fmt: skip
    found = execute(schedule.read(text, "v6e"))
    assert found.unknown_branches == (2,)
    assert found.cycles == 7
    forced = execute(schedule.read(text, "v6e"), trips={0: 6})
    assert forced.loops == (Loop(header=0, body=7, entries=1, iterations=6),)

  def test_an_unknown_instruction_is_reported(self):
    found = execute(schedule.read(text_of("%s0_s1 = sfly.s32 1, 2"), "v6e"))
    assert found.unsupported == ("sfly.s32",)

  def test_an_endless_program_ends_with_an_error(self):
    text = text_of("%2 = sbr.rel target bundleno = 0 (0x0), region = 1", *[""] * 4)
    with pytest.raises(RuntimeError, match="does not end within 1000 words"):
      execute(schedule.read(text, "v6e"), limit=1000)


def test_delay_slots_of_each_generation():
  jump = "%2 = sbr.rel target bundleno = 9 (0x9), region = 1"
  text = text_of(jump, *["%s0_s1 = smov 1"] * 9)
  for generation, slots in (("v5e", 4), ("v5p", 4), ("v6e", 4), ("tpu7x", 6)):
    assert execute(schedule.read(text, generation)).cycles == 1 + slots + 1


def test_texts_of_another_kind_are_refused():
  with pytest.raises(ValueError, match="no VLIW word"):
    schedule.read("Schedule analysis:\n", "v6e")
  with pytest.raises(ValueError, match="no table of units"):
    schedule.read_units("Schedule analysis:\n")
  with pytest.raises(ValueError, match="generation is 'v4'; it must be one of v5e"):
    schedule.read("", "v4")
