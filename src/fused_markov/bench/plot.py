"""Time against rows, one panel a temperature, with the floor drawn in."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Draw the lines of `table.run` into an image file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    temperatures = list(dict.fromkeys(line["temperature"] for line in lines))
    figure, axes = plt.subplots(
        1, len(temperatures), figsize=(4.5 * len(temperatures), 4), squeeze=False, sharey=True
    )
    for axis, temperature in zip(axes[0], temperatures, strict=True):
        here = [line for line in lines if line["temperature"] == temperature]
        for name in dict.fromkeys(name for line in here for name in line["engines"]):
            points = [
                (line["rows"], line["engines"][name]["median_us"])
                for line in here
                if "median_us" in line["engines"].get(name, {})
            ]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=name)
        rows = [line["rows"] for line in here]
        axis.plot(rows, [line["floor_us"] for line in here], "k--", label="floor (bytes)")
        axis.set(xscale="log", yscale="log", xlabel="rows", title=_title(temperature))
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("µs a decode step")
    axes[0][0].legend()
    first = lines[0]
    figure.suptitle(
        f"{first['device']}: V={first['vocab']} r={first['rank']} S={first['steps']} "
        f"{first['dtype']}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _title(temperature: str) -> str:
    return "greedy, no cache" if temperature == "greedy" else f"T={temperature}"
