"""Time a decode step against rows, steps or vocabulary, with the floor drawn in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Lines = list[dict[str, Any]]


def plot(lines: Lines, path: Path) -> None:
    """Draw the lines of `table.run` against rows into an image file, one panel a temperature."""
    temperatures = list(dict.fromkeys(line["temperature"] for line in lines))
    panels = {
        _title(temperature): ("rows", [x for x in lines if x["temperature"] == temperature])
        for temperature in temperatures
    }
    first = lines[0]
    _figure(
        panels,
        f"{first['device']}: V={first['vocab']} r={first['rank']} S={first['steps']} "
        f"{first['dtype']}",
        path,
    )


def plot_growth(lines_by_key: dict[str, Lines], title: str, path: Path) -> None:
    """Draw lines of `table.run` into an image file, one panel for each key that they differ in."""
    _figure({f"against {key}": (key, lines) for key, lines in lines_by_key.items()}, title, path)


def _figure(panels: dict[str, tuple[str, Lines]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.5 * len(panels), 4), squeeze=False, sharey=True
    )
    for axis, (name, (key, lines)) in zip(axes[0], panels.items(), strict=True):
        _draw(axis, key, lines)
        axis.set(title=name)
    axes[0][0].set_ylabel("µs a decode step")
    axes[0][0].legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _draw(axis: Any, key: str, lines: Lines) -> None:
    for name in dict.fromkeys(name for line in lines for name in line["engines"]):
        points = [
            (line[key], line["engines"][name]["median_us"])
            for line in lines
            if "median_us" in line["engines"].get(name, {})
        ]
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
    at = [line[key] for line in lines]
    axis.plot(at, [line["floor_us"] for line in lines], "k--", label="floor (bytes)")
    axis.set(xscale="log", yscale="log", xlabel=key)
    axis.set_xscale("log", base=2)
    axis.grid(alpha=0.3)


def _title(temperature: str) -> str:
    return "greedy, no cache" if temperature == "greedy" else f"T={temperature}"
