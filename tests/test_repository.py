"""Laws of the tree: packaging, the order of the rooms, and what no file may mention."""

import ast
import configparser
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("pallas_kernels", "deepseek_jax")
LONGEST_MODULE = 400

# A module imports from its own room and from rooms to its left.
ROOMS = {
    "pallas_kernels": 0,
    "deepseek_jax.fields": 1,
    "deepseek_jax.lora": 1,
    "deepseek_jax.parameter_paths": 1,
    "deepseek_jax.model_config": 1,
    "deepseek_jax.config": 1,
    "deepseek_jax.schedule": 2,
    "deepseek_jax.cli": 2,
    "deepseek_jax.distributed": 2,
    "deepseek_jax.tokenizer": 3,
    "deepseek_jax.baselines": 3,
    "deepseek_jax.ledger": 3,
    "deepseek_jax.sharding": 3,
    "deepseek_jax.quant": 3,
    "deepseek_jax.word_rows": 3,
    "deepseek_jax.weight_formats": 3,
    "deepseek_jax.quantised": 3,
    "deepseek_jax.cache": 3,
    "deepseek_jax.nn": 4,
    "deepseek_jax.checkpoint": 5,
    "deepseek_jax.serve": 6,
    "deepseek_jax.train": 7,
    "deepseek_jax.eval": 8,
    "deepseek_jax": 9,
}

# Written so that the patterns do not match themselves.
MACHINE_PATH = re.compile(r"(?<![\w./~-])/(?:work|tmp|root|home|farm|opt|Users)(?:/|\b)")
SHARED_FOLDER = re.compile(r"(?<!\w)shared/(?:notes|spec|golden|hooks|tools)\b")
REGISTRY_HOST = re.compile(r"pypi\.org|pythonhosted\.org|registry\.npmjs|deb\.debian\.org")

# Distributions whose import name is not the distribution's name with underscores.
IMPORT_NAMES = {"absl-py": "absl", "orbax-checkpoint": "orbax", "pyyaml": "yaml"}


def tree_files():
  """Files that are tracked, or would be after `git add --all`."""
  listing = subprocess.run(
      ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
      cwd=ROOT,
      check=True,
      capture_output=True,
      text=True,
  ).stdout
  files = (ROOT / name for name in listing.split("\0") if name)
  return sorted({file for file in files if file.is_file()})


def python_files(*folders):
  return [
      file
      for file in tree_files()
      if file.suffix == ".py" and file.relative_to(ROOT).parts[0] in folders
  ]


def module_name(file):
  parts = file.relative_to(ROOT).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(node):
  """Every dotted name that the imports under `node` could bind, longest form first for `from`."""
  for child in ast.walk(node):
    if isinstance(child, ast.Import):
      yield from ((alias.name,) for alias in child.names)
    elif isinstance(child, ast.ImportFrom):
      assert child.level == 0, f"relative import of {child.module}"
      yield from ((f"{child.module}.{alias.name}", child.module) for alias in child.names)


def import_graph():
  """Maps each module of the packages to the modules of the packages that it imports."""
  trees = {module_name(file): ast.parse(file.read_text()) for file in python_files(*PACKAGES)}
  return {
      module: {
          next(name for name in names if name in trees)
          for names in imported_names(tree)
          if any(name in trees for name in names)
      }
      - {module}
      for module, tree in trees.items()
  }


def room(module):
  parts = module.split(".")
  name = parts[0] if parts[0] == "pallas_kernels" else ".".join(parts[:2])
  assert name in ROOMS, f"{module}: give the room {name} a place in ROOMS"
  return ROOMS[name]


def outside_imports(nodes):
  """Top-level names of what `nodes` import that is neither ours nor in the standard library."""
  tops = {names[0].split(".")[0] for node in nodes for names in imported_names(node)}
  return tops - set(PACKAGES) - sys.stdlib_module_names


def import_name(requirement):
  distribution = re.match(r"[\w.-]+", requirement).group()
  return IMPORT_NAMES.get(distribution, distribution.replace("-", "_"))


def declared_imports():
  """Import names of `install_requires`, and those with the extras a lazy import may need."""
  setup = configparser.ConfigParser()
  setup.read(ROOT / "setup.cfg")
  required = {import_name(line) for line in setup["options"]["install_requires"].split()}
  extras = {
      import_name(line)
      for extra in ("tpu", "data", "text")
      for line in setup["options.extras_require"][extra].split()
  }
  return required, required | extras


def test_dependencies_stand_in_setup_cfg_alone():
  assert "project" not in tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_no_file_mentions_a_machine():
  files = tree_files()
  assert ROOT / "setup.cfg" in files
  found = []
  for file in files:
    try:
      text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
      continue
    for number, line in enumerate(text.splitlines(), start=1):
      for pattern in (MACHINE_PATH, SHARED_FOLDER, REGISTRY_HOST):
        if match := pattern.search(line):
          found.append(f"{file.relative_to(ROOT)}:{number}: {match.group()}")
  assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "mentions"),
    [
        ("see /" + "tmp/run", True),
        ("--workdir=/" + "work/run", True),
        ("'/" + "home'", True),
        ("#!/usr/bin/env bash", False),
        ("runs/work/finetune", False),
        ("example.org/home/", False),
        ("multiply/workload", False),
    ],
)
def test_machine_paths_are_recognised(line, mentions):
  assert bool(MACHINE_PATH.search(line)) == mentions


def test_rooms_import_from_the_left():
  wrong = []
  for module, targets in import_graph().items():
    own = room(module)
    wrong += [f"{module} imports {target}" for target in targets if room(target) > own]
  assert not wrong, "\n".join(wrong)


def test_imports_have_no_cycle():
  graph = import_graph()
  while leaves := [module for module, targets in graph.items() if not targets & graph.keys()]:
    for module in leaves:
      del graph[module]
  assert not graph, f"modules in or above a cycle: {sorted(graph)}"


def test_nothing_imports_programs_or_tests():
  wrong = [
      f"{file.relative_to(ROOT)} imports {names[0]}"
      for file in python_files(*PACKAGES, "configs", "scripts")
      for names in imported_names(ast.parse(file.read_text()))
      if names[0].split(".")[0] in ("scripts", "notebooks", "tests")
  ]
  assert not wrong, "\n".join(wrong)


def test_packages_import_what_setup_cfg_declares():
  required, with_extras = declared_imports()
  wrong = []
  for file in python_files(*PACKAGES):
    tree = ast.parse(file.read_text())
    at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    undeclared = outside_imports(at_import) - required
    undeclared |= outside_imports([tree]) - with_extras
    wrong += [f"{file.relative_to(ROOT)} imports {name}" for name in sorted(undeclared)]
  assert not wrong, "\n".join(wrong)


def test_every_sub_package_is_installed():
  folders = {file.parent for file in python_files(*PACKAGES)}
  for folder in list(folders):
    folders |= {above for above in folder.parents if above.is_relative_to(ROOT) and above != ROOT}
  missing = [folder for folder in folders if not (folder / "__init__.py").is_file()]
  assert not missing


def test_programs_configs_and_tests_are_no_packages():
  names = [file.name for file in python_files("configs", "scripts", "tests")]
  assert "__init__.py" not in names


def test_annotations_stay_checkable():
  """Postponed annotations are strings, which jaxtyping's run-time check ignores."""
  wrong = [
      file
      for file in python_files(*PACKAGES, "configs", "scripts", "tests")
      for names in imported_names(ast.parse(file.read_text()))
      if names[0] == "__future__.annotations"
  ]
  assert not wrong


def test_modules_are_short():
  lengths = {
      str(file.relative_to(ROOT)): len(file.read_text().splitlines())
      for file in tree_files()
      if file.suffix == ".py"
  }
  assert lengths
  assert not {name: n for name, n in lengths.items() if n > LONGEST_MODULE}
