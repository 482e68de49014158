"""Laws of the notebooks: what stands in git, not what they compute (`make notebooks` runs them)."""

import ast
import configparser
import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# Machine paths are looked for in every file by test_repository.py; these are Colab's.
COLAB_PATH = re.compile(r"(?<![\w./~-])/content(?:/|\b)|google\.colab")
EMPTY_WORDS = re.compile(
    r"(?i)\b(?:robust|comprehensive|seamless|powerful|state-of-the-art|simply)"
)
KEYS = {
    "code": {"cell_type", "execution_count", "id", "metadata", "outputs", "source"},
    "markdown": {"cell_type", "id", "metadata", "source"},
}


def read(path):
  return json.loads(path.read_text(encoding="utf-8"))


def sources(notebook, kind):
  return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == kind]


def test_notebooks_by_number():
  assert [path.name[:2] for path in NOTEBOOKS] == ["1_", "2_", "3_", "4_", "5_", "6_"]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
  return read(request.param)


def test_format_is_nbformat_4_5(notebook):
  """The parts of the schema of nbformat 4.5 that these notebooks use, and nothing else."""
  assert set(notebook) == {"cells", "metadata", "nbformat", "nbformat_minor"}
  assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
  assert notebook["metadata"]["kernelspec"]["name"] == "python3"
  for cell in notebook["cells"]:
    assert set(cell) == KEYS[cell["cell_type"]]
    assert cell["metadata"] == {}
    assert all(isinstance(line, str) for line in cell["source"])
    assert all(line.endswith("\n") for line in cell["source"][:-1])
  ids = [cell["id"] for cell in notebook["cells"]]
  assert len(set(ids)) == len(ids)
  assert all(re.fullmatch(r"[\w-]{1,64}", name) for name in ids)


def test_outputs_and_counts_are_stripped(notebook):
  code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
  assert code
  assert all(c["outputs"] == [] and c["execution_count"] is None for c in code)


def test_title_stands_first(notebook):
  first = notebook["cells"][0]
  assert first["cell_type"] == "markdown"
  assert re.match(r"# \d · \w", first["source"][0])


def test_first_code_cell_installs_and_checks_versions():
  """One cell for all, which reads its bounds from setup.cfg and writes none of its own."""
  (setup,) = {sources(read(path), "code")[0] for path in NOTEBOOKS}
  assert re.search(r'^REPOSITORY = "[^"]+"$', setup, re.MULTILINE)
  assert "setup.cfg" in setup
  assert not re.search(r"[=<>~]=\s*['\"]?\d", setup)


def first_cell(tmp_path, monkeypatch, edit):
  """Runs the setup cell in a checkout whose setup.cfg was edited."""
  setup = configparser.ConfigParser()
  setup.read(ROOT / "setup.cfg")
  edit(setup)
  (tmp_path / "configs").mkdir()
  (tmp_path / "configs" / "flash.py").touch()
  with open(tmp_path / "setup.cfg", "w") as file:
    setup.write(file)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(ROOT))
  names = {}
  exec(sources(read(NOTEBOOKS[0]), "code")[0], names)
  return names


def test_setup_passes_here(tmp_path, monkeypatch):
  assert first_cell(tmp_path, monkeypatch, lambda setup: None)["ROOT"] == tmp_path


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("options", "install_requires", "\njax>=99.0", r"jax [\d.]+: needs >=99\.0"),
        ("options", "install_requires", "\nno-such-name", "no-such-name is missing"),
        ("options", "python_requires", ">=99", r"Python [\d.]+: needs >=99"),
    ],
)
def test_setup_names_what_is_too_old(tmp_path, monkeypatch, section, field, value, message):
  with pytest.raises(ImportError, match=message):
    first_cell(tmp_path, monkeypatch, lambda setup: setup.set(section, field, value))


def test_code_parses_without_magics(notebook):
  for source in sources(notebook, "code"):
    ast.parse(source)


def test_figures_have_titles_and_units(notebook):
  """Every figure has a title; its axes have labels, or no ticks where the text itself is drawn."""
  figures = [s for s in sources(notebook, "code") if "plt.show()" in s]
  assert figures
  assert all("set_title(" in source for source in figures)
  axes = re.compile(r"[xy]label|xticks=\[\], yticks=\[\]")
  assert all(axes.search(source) for source in figures)


def test_words(notebook):
  text = "\n".join(sources(notebook, "code") + sources(notebook, "markdown"))
  assert not COLAB_PATH.search(text)
  assert not EMPTY_WORDS.search(text)
  assert max(map(len, text.splitlines())) <= 105
