"""Charts of a bench: time to first token, time per output token and throughput, side by side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from spillway.bench.measure import Row

SIZE_INCHES: Final = (14, 4.8)
DOTS_PER_INCH: Final = 150
LIGHTEST: Final = 0.88  # end of the color map in use: lighter colors are too pale on white
MARKERS: Final = "osD^vP"


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    y_label: str
    y: Callable[[Row], float | None]
    x_label: str
    x: Callable[[Row], int]
    series_title: str
    series: Callable[[Row], tuple[int, ...]]
    is_log: bool = False


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write a PNG or SVG, by the suffix of ``path``. Raises OSError."""
    panels = (
        _Panel(
            "Time to first token",
            "TTFT p50 (ms)",
            _ttft,
            "prompt (tokens)",
            _prompt,
            "concurrent requests",
            _batch,
            is_log=True,
        ),
        _Panel(
            "Time per output token",
            "TPOT p50 (ms)",
            _tpot,
            "concurrent requests",
            _requests,
            "prompt + new tokens",
            _lengths,
        ),
        _Panel(
            "Decode",
            "new tokens per second",
            _decode,
            "concurrent requests",
            _requests,
            "prompt + new tokens",
            _lengths,
        ),
    )
    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")
    figure.suptitle(title, fontsize=11)
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        _plot(axes, panel, rows)
    figure.savefig(path)


def _plot(axes: Axes, panel: _Panel, rows: Sequence[Row]) -> None:
    names = sorted({panel.series(row) for row in rows})
    for number, name in enumerate(names):
        points = sorted((panel.x(row), y) for row in rows if panel.series(row) == name and (y := panel.y(row)))
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            marker=MARKERS[number % len(MARKERS)],
            color=colormaps["viridis"](LIGHTEST * number / max(1, len(names) - 1)),
            label=" + ".join(f"{part:,}" for part in name),
        )
    axes.set_title(panel.title, fontsize=12, fontweight="bold")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({panel.x(row) for row in rows}), minor=False)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if panel.is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.grid(visible=True, color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.legend(title=panel.series_title, fontsize=9, title_fontsize=9, frameon=True, framealpha=0.9)


def _ttft(row: Row) -> float | None:
    return row.ttft_p50_ms


def _tpot(row: Row) -> float | None:
    return row.tpot_p50_ms


def _decode(row: Row) -> float | None:
    return row.decode_tokens_per_s


def _prompt(row: Row) -> int:
    return row.prompt_tokens


def _requests(row: Row) -> int:
    return row.batch


def _batch(row: Row) -> tuple[int, ...]:
    return (row.batch,)


def _lengths(row: Row) -> tuple[int, ...]:
    return (row.prompt_tokens, row.new_tokens)
