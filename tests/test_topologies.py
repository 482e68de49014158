"""Slices, the mesh that a model gets on one, and what is read from a program's text."""

import dataclasses
import pathlib

import pytest

from deepseek_jax import cli
from deepseek_jax.config import Config, MeshConfig
from deepseek_jax.eval import hlo, topologies

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


def flash():
  return Config.from_config_dict(cli.load(str(CONFIGS / "flash.py")))


@pytest.mark.parametrize("name", ["v5p:4x4x8", "v6e:16x16", "tpu7x:4x4x4", "v5e:4x8"])
@pytest.mark.parametrize("mode", ["train", "prefill", "decode"])
def test_the_mesh_of_a_slice_uses_every_device_and_divides_the_model(name, mode):
  at, config = topologies.topology(name), flash()
  mesh = topologies.mesh_for(config, at.devices, mode)
  assert mesh.devices == at.devices
  assert config.model.n_routed_experts % (mesh.expert * mesh.seq) == 0
  if mode == "train":
    assert config.train.seq_len // mesh.seq <= 4096
  else:
    assert mesh.seq == mesh.fsdp == 1


def test_a_configured_mesh_is_taken_or_refused():
  config = dataclasses.replace(flash(), mesh=MeshConfig(expert=8))
  assert topologies.mesh_for(config, 8, "decode") == config.mesh
  with pytest.raises(ValueError, match="mesh is .* it must be of 16 devices in all"):
    topologies.mesh_for(config, 16, "decode")


def test_slices_are_ascending_and_counted_in_chips():
  for generation in topologies.SLICES:
    first = topologies.Topology(generation, topologies.SLICES[generation][0])
    chips = [each.chips for each in topologies.larger(first)]
    assert chips == sorted(set(chips))
  assert topologies.topology("tpu7x:4x4x4").devices == 128


@pytest.mark.parametrize("name", ["v5p", "v5p:3x3x3", "v4:2x2x1", "v6e:4x4x4", ""])
def test_a_topology_that_does_not_exist_is_refused_with_those_that_do(name):
  with pytest.raises(ValueError, match="topology is .* it must be .*v"):
    topologies.topology(name)


PROGRAM = """\
%body.1 (p: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %ag = bf16[32,4]{1,0:T(8,128)} all-gather(%x), dimensions={0}
  ROOT %t = (s32[], bf16[8,4]) tuple(%i, %y)
}

%cond.1 (p: (s32[], bf16[8,4])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main.2 (a: bf16[8,4]) -> bf16[8,4] {
  %w = (s32[], bf16[8,4]) while(%t0), condition=%cond.1, body=%body.1, TRIPS
  %s = (f32[16], f32[64]) all-gather-start(%b), dimensions={0}
  %d = f32[64] all-gather-done(%s)
  ROOT %r = f32[2,3] all-to-all(%c), dimensions={0}
}
""".replace("TRIPS", 'backend_config={"known_trip_count":{"n":"5"}}')


def test_collectives_in_a_loop_count_as_often_as_it_turns():
  found = hlo.collectives(PROGRAM)
  assert found == {
      "all-gather": hlo.Collectives(count=6, bytes=5 * 256 + 256, largest=256),
      "all-to-all": hlo.Collectives(count=1, bytes=24, largest=24),
  }
  assert (
      hlo.collectives("ENTRY %main (a: f32[2]) -> f32[2] {\n  ROOT %a = f32[2] copy(%b)\n}") == {}
  )


def test_a_step_needs_a_mode_and_sizes():
  from deepseek_jax.eval import fit

  at = topologies.topology("v6e:2x2")
  with pytest.raises(ValueError, match="mode is 'serve'; it must be one of"):
    fit.compile_for(at, flash(), "serve")
  with pytest.raises(ValueError, match="context is 0; it must be at least 1"):
    fit.compile_for(at, flash(), "decode", context=0)
