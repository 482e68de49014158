"""What the replay experiment left in its folder, as figures, tables and plots.

Answers of all seeds are pooled: flips are counted on prompts that two arms, or two trainings of one
seed, both answered; errors are those of the mean over prompts.
"""

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from deepseek_jax.eval import replay_experiment as experiment
from deepseek_jax.eval import replay_text, resume
from deepseek_jax.eval.replay_experiment import TRAININGS
from deepseek_jax.eval.resume import Answers

# A byte of a response, and the mean over all of them.
BYTES = ("1", "2", "4", "8", "32", "all")


def cell(answers: Answers, exact: Answers) -> dict[str, Any]:
  """Statistics of answers, and against those of the model that was tuned on exact rows."""
  found = {
      "n": len(answers.spans),
      "accuracy": {
          arm: resume.accuracy(right) for arm, right in zip(resume.ARMS, answers.right)
      },
  }  # fmt: skip
  for number, (other, arm) in enumerate(resume.PAIRS):
    a, b = resume.ARMS.index(other), resume.ARMS.index(arm)
    cost = answers.nll[b] - answers.nll[a]
    found[f"{arm}_against_{other}"] = {
        **resume.flips(answers.right[a], answers.right[b])._asdict(),
        "nll": resume.mean(cost),
        "kl": resume.mean(answers.kl[number]),
        "nll_over_exact": resume.mean(cost - (exact.nll[b] - exact.nll[a])),
    }
  found["against_exact"] = {
      arm: {
          **resume.flips(exact.right[i], answers.right[i])._asdict(),
          "nll": resume.mean(answers.nll[i] - exact.nll[i]),
      }
      for i, arm in enumerate(resume.ARMS)
  }
  return found


def _part(answers: Answers, chosen: np.ndarray) -> Answers:
  return jax.tree.map(lambda a: a[..., chosen], answers)


def _measured(setting, measure, distance: int, seeds: int, workdir: pathlib.Path):
  """Cells by training: all prompts, every span, every seed."""
  read = lambda seed, training: Answers(
      **experiment.read_arrays(
          workdir / f"{setting.name}_{seed}_{training}_{measure.name}_{distance}.npz"
      )
  )
  each = {training: [read(seed, training) for seed in range(seeds)] for training in TRAININGS}
  whole = {
      training: jax.tree.map(lambda *a: np.concatenate(a, axis=-1), *parts)
      for training, parts in each.items()
  }
  found = {}
  for training, answers in whole.items():
    spans = []
    for low, high in zip(measure.edges, measure.edges[1:]):
      chosen = (answers.spans >= low) & (answers.spans < high)
      parts = _part(answers, chosen), _part(whole["exact"], chosen)
      spans.append({"span": (low, high), **cell(*parts)})
    found[training] = {
        **cell(answers, whole["exact"]),
        "spans": spans,
        "seeds": [
            {arm: float(right.mean()) for arm, right in zip(resume.ARMS, one.right)}
            for one in each[training]
        ],
        "noise": float(answers.noise.max()),
    }
  return found


def _bytes(values: np.ndarray) -> dict[str, tuple[float, float]]:
  """Mean and error of [turns, response] by byte of `BYTES`."""
  parts = {b: values[:, int(b) - 1] for b in BYTES[:-1]} | {"all": values.mean(axis=1)}
  return {b: resume.mean(part) for b, part in parts.items()}


def text_cells(each: Mapping[str, list[Mapping[str, np.ndarray]]]) -> dict[str, Any]:
  """Nats a byte of every training: by arm, what replays cost, and against exact rows.

  Args:
    each: −log p [turns, response] by training, seed and arm.
  """
  whole = {
      training: {arm: np.concatenate([one[arm] for one in parts]) for arm in "ABD"}
      for training, parts in each.items()
  }
  excess = {
      training: {"B_over_A": own["B"] - own["A"], "D_over_B": own["D"] - own["B"]}
      for training, own in whole.items()
  }
  found = {}
  for training, own in whole.items():
    cost, reference = excess[training], excess["exact"]
    found[training] = {
        "turns": len(own["A"]),
        "nll": {arm: _bytes(own[arm]) for arm in "ABD"},
        **{pair: _bytes(values) for pair, values in cost.items()},
        "against_exact": {
            **{arm: _bytes(own[arm] - whole["exact"][arm]) for arm in "ABD"},
            **{pair: _bytes(cost[pair] - reference[pair]) for pair in cost},
        },
        "seeds": {
            pair: [float((one[pair[0]] - one[pair[-1]])[:, 0].mean()) for one in each[training]]
            for pair in cost
        },
    }
  return found


def results(settings: Iterable, seeds: int, workdir: pathlib.Path) -> dict[str, Any]:
  """All of it, from the files of a run that has ended."""
  found, texts, errors = {}, {}, []
  for setting in settings:
    read = lambda name, own=setting.name: json.loads((workdir / f"{own}_{name}.json").read_text())
    about = {"window": setting.window, "steps": read("steps")}
    names = [(seed, training) for training in TRAININGS for seed in range(seeds)]
    if isinstance(setting, replay_text.Setting):
      each = {training: [] for training in TRAININGS}
      for seed, training in names:
        path = workdir / f"{setting.name}_{seed}_{training}_costs.npz"
        each[training].append(experiment.read_arrays(path))
      texts[setting.name] = {**about, "trainings": text_cells(each)}
      continue
    errors += [read(f"{seed}_{training}_simulation") for seed, training in names]
    for measure in setting.measures:
      cells = {str(d): _measured(setting, measure, d, seeds, workdir) for d in measure.distances}
      found[f"{setting.name}/{measure.name}"] = {**about, "distances": cells}
  noise = [
      one["noise"]
      for own in found.values() for cells in own["distances"].values() for one in cells.values()
  ]  # fmt: skip
  return {
      "seeds": seeds,
      "simulation_equality": max(errors, default=0.0),
      "arms_equality": max(noise, default=0.0),
      "settings": found,
      "texts": texts,
  }


def short(result: dict[str, Any]) -> dict[str, Any]:
  """A line of figures: accuracy nearest the boundary, costs of text at byte 1.

  `accuracy` is that of buried facts, the task of the question; None without them.
  """
  accuracy, prompts = {}, {}
  for name, own in result["settings"].items():
    nearest = next(iter(own["distances"].values()))
    prompts[name] = nearest["exact"]["n"]
    accuracy[name] = {
        training: {arm: round(one["accuracy"][arm][0], 4) for arm in resume.ARMS}
        for training, one in nearest.items()
    }
  return {
      "seeds": result["seeds"],
      "seconds": result["seconds"],
      "serving_equality_max_abs": result["simulation_equality"],
      "arms_equality_max_abs": result["arms_equality"],
      **result["cost"],
      "prompts": prompts.get("facts/buried"),
      "accuracy": accuracy.get("facts/buried"),
      "prompts_by_setting": prompts,
      "accuracy_by_setting": accuracy,
      "text_nats": {
          name: {
              training: {pair: round(one[pair]["1"][0], 4) for pair in ("B_over_A", "D_over_B")}
              for training, one in own["trainings"].items()
          }
          for name, own in result["texts"].items()
      },
  }


def _table(heads: list[str], rows: Iterable[list[str]]) -> str:
  lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _share(found: tuple[float, float, float]) -> str:
  return f"{100 * found[0]:.1f} ({100 * found[1]:.1f}–{100 * found[2]:.1f})"


def _flips(found: Mapping[str, Any]) -> str:
  return f"+{found['gained']} −{found['lost']}, {found['p']:.1g}"


def _nats(found: tuple[float, float]) -> str:
  return f"{found[0]:.4f} ± {found[1]:.4f}".replace("-", "−")


def tables(result: dict[str, Any]) -> str:
  """Markdown. Shares in per cent with 95 % intervals, nats with standard errors."""
  parts = []
  for name, own in result["settings"].items():
    cells = own["distances"].items()
    n = next(iter(next(iter(own["distances"].values())).values()))["n"]
    parts.append(
        f"### {name}\n\nW = {own['window']}, {result['seeds']} seeds, {n} prompts a row,"
        f" fine-tuned for {own['steps']} steps.\n"
    )
    heads = ["distance, fine-tuned on", *resume.ARMS, "B flips A, p", "D flips C, p"]
    heads += ["B − A, nats", "D − C, nats"]
    rows = [
        [
            f"{d}, {training}", *(_share(one["accuracy"][arm]) for arm in resume.ARMS),
            *(_flips(one[pair]) for pair in ("B_against_A", "D_against_C")),
            *(_nats(one[pair]["nll"]) for pair in ("B_against_A", "D_against_C")),
        ]
        for d, trainings in cells for training, one in trainings.items()
    ]  # fmt: skip
    parts.append(_table(heads, rows))
    heads = ["distance, span (prompts)"]
    heads += [f"{training}: {arm}" for training in TRAININGS for arm in "ABD"]
    rows = []
    for d, trainings in cells:
      for i, span in enumerate(trainings["exact"]["spans"]):
        low, high = span["span"]
        row = [f"{d}, {low} to {high - 1} ({span['n']})"]
        for training in TRAININGS:
          accuracy = trainings[training]["spans"][i]["accuracy"]
          row += [f"{100 * accuracy[arm][0]:.1f}" for arm in "ABD"]
        rows.append(row)
    parts.append(_table(heads, rows))
    heads = ["distance, fine-tuned on; against exact rows"]
    heads += [f"{arm}: {what}" for arm in "ABD" for what in ("flips, p", "nats")]
    heads += ["B − A, nats", "D − C, nats"]
    rows = []
    for d, trainings in cells:
      for training in TRAININGS[1:]:
        against = trainings[training]["against_exact"]
        row = [f"{d}, {training}"]
        for arm in "ABD":
          row += [_flips(against[arm]), _nats(against[arm]["nll"])]
        for pair in ("B_against_A", "D_against_C"):
          row.append(_nats(trainings[training][pair]["nll_over_exact"]))
        rows.append(row)
    parts.append(_table(heads, rows))
  for name, own in result["texts"].items():
    first = own["trainings"]["exact"]
    parts.append(
        f"### {name}\n\nW = {own['window']}, {result['seeds']} seeds, {first['turns']} responses,"
        f" fine-tuned for {own['steps']} steps. Nats a byte.\n"
    )
    heads = [f"byte {b}" if b != "all" else "all" for b in BYTES]
    for pair in ("B_over_A", "D_over_B"):
      rows = [
          [training, *(_nats(one[pair][b]) for b in BYTES)]
          for training, one in own["trainings"].items()
      ]
      rows += [
          [f"{training} − exact", *(_nats(one["against_exact"][pair][b]) for b in BYTES)]
          for training, one in own["trainings"].items()
          if training != "exact"
      ]
      parts.append(_table([pair.replace("_", " "), *heads], rows))
    rows = [
        [f"{training} − exact, arm {arm}", *(_nats(one["against_exact"][arm][b]) for b in BYTES)]
        for training, one in own["trainings"].items() if training != "exact"
        for arm in "ABD"
    ]  # fmt: skip
    parts.append(_table(["−log p", *heads], rows))
  return "\n".join(parts)


def plots(result: dict[str, Any], folder: pathlib.Path) -> None:
  """`accuracy.svg`, `cost.svg`, `spans.svg` of the tasks, and `text.svg`."""
  drawn = {"text": draw_text} if result["texts"] else {}
  if result["settings"]:
    drawn |= {"accuracy": draw_accuracy, "cost": draw_cost, "spans": draw_spans}
  for name, draw in drawn.items():
    draw(result).savefig(folder / f"{name}.svg", metadata={"Date": None})


_COLOURS = dict(zip(TRAININGS, ("#7f9fb5", "#0072b2", "#d55e00")))


def _figure(rows: int, columns: int):
  import matplotlib.backends.backend_agg
  import matplotlib.figure

  size = (4.2 * columns, 3.4 * rows)
  figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
  matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
  return figure, figure.subplots(rows, columns, squeeze=False)


def _curve(axes, at, found: list[tuple[float, float]], training: str) -> None:
  """Means with standard errors."""
  axes.errorbar(
      at, *zip(*found), fmt="o-", ms=4, capsize=2, color=_COLOURS[training], label=training
  )
  axes.axhline(0, color="black", lw=0.5)


def draw_accuracy(result: dict[str, Any]):
  """By arm, a bar a training, with 95 % intervals; the distance nearest the boundary."""
  figure, panels = _figure(1, len(result["settings"]))
  for axes, (name, own) in zip(panels[0], result["settings"].items()):
    distance, cells = next(iter(own["distances"].items()))
    for i, training in enumerate(TRAININGS):
      found = np.array([cells[training]["accuracy"][arm] for arm in resume.ARMS])
      errors = np.abs(found[:, 1:] - found[:, :1]).T
      at = np.arange(len(found)) + 0.27 * (i - 1)
      axes.bar(at, found[:, 0], 0.25, yerr=errors, color=_COLOURS[training], label=training)
    low = min(one["accuracy"][arm][1] for one in cells.values() for arm in resume.ARMS)
    axes.set_xticks(range(len(resume.ARMS)), list(resume.ARMS))
    axes.set(title=f"{name}, {distance} after", xlabel="serving arm", ylim=(max(0, low - 0.1), 1))
  panels[0, 0].set_ylabel("exact match")
  panels[0, 0].legend(title="fine-tuned on", fontsize=8)
  return figure


def draw_cost(result: dict[str, Any]):
  """Nats that a replay costs by distance after the boundary, with standard errors."""
  figure, panels = _figure(2, len(result["settings"]))
  for row, pair in zip(panels, ("B_against_A", "D_against_C")):
    for axes, (name, own) in zip(row, result["settings"].items()):
      distances = [int(d) for d in own["distances"]]
      for training in TRAININGS:
        found = [cells[training][pair]["nll"] for cells in own["distances"].values()]
        _curve(axes, distances, found, training)
      axes.set(title=f"{name}: {pair.replace('_', ' ')}", xlabel="tokens after the boundary")
    row[0].set_ylabel("nats of the answer")
  panels[0, 0].legend(title="fine-tuned on", fontsize=8)
  return figure


def draw_spans(result: dict[str, Any]):
  """Accuracy of arms A and D by span, nearest the boundary."""
  figure, panels = _figure(1, len(result["settings"]))
  for axes, (name, own) in zip(panels[0], result["settings"].items()):
    distance, cells = next(iter(own["distances"].items()))
    for training in TRAININGS:
      spans = cells[training]["spans"]
      for arm, style in (("A", "o--"), ("D", "s-")):
        found = [one["accuracy"][arm][0] for one in spans]
        axes.plot(found, style, ms=4, color=_COLOURS[training], label=f"{training}, {arm}")
    labels = [f"{low}–{high - 1}" for low, high in (one["span"] for one in spans)]
    axes.set_xticks(range(len(labels)), labels)
    axes.set(title=f"{name}, {distance} after", xlabel="tokens from source to boundary")
    axes.set_ylim(0, 1.03)
  panels[0, 0].set_ylabel("exact match")
  panels[0, 0].legend(fontsize=7)
  return figure


def draw_text(result: dict[str, Any]):
  """Nats a byte that the encoder's replay costs, by byte of the response."""
  figure, panels = _figure(1, len(result["texts"]))
  bytes_ = [int(b) for b in BYTES[:-1]]
  for axes, (name, own) in zip(panels[0], result["texts"].items()):
    for i, training in enumerate(TRAININGS):
      found = [own["trainings"][training]["D_over_B"][b] for b in BYTES[:-1]]
      _curve(axes, np.array(bytes_) * 1.06 ** (i - 1), found, training)
    axes.set_xscale("log", base=2)
    axes.set(title=f"{name}: D over B", xlabel="byte after the boundary")
  panels[0, 0].set_ylabel("nats a byte")
  panels[0, 0].legend(title="fine-tuned on", fontsize=8)
  return figure
