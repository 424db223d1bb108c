"""A picture of a simulation: what arrived, and which machines served."""

from pathlib import Path

import numpy as np

from fleet.simulation.world import Outcome


def draw(outcome: Outcome, path: Path) -> None:
    """Draw arrivals, ready machines by pool and the queue, by minute. Needs matplotlib."""
    import matplotlib as mpl  # noqa: PLC0415  # an extra

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    minutes = len(outcome.arriving)
    hours = np.arange(minutes) / 60
    figure, (speeds, queue) = plt.subplots(2, 1, sharex=True, figsize=(12, 6), height_ratios=(3, 1))
    series = [np.asarray(ready[:minutes]) / 1000 for ready in outcome.ready.values()]
    speeds.stackplot(hours, *series, labels=[f"{name} machines" for name in outcome.ready], alpha=0.6)
    speeds.plot(hours, np.asarray(outcome.arriving) / 1000, color="black", linewidth=0.7, label="interactive arrivals")
    speeds.set_ylabel("thousand tokens per second")
    speeds.legend(loc="upper left")
    speeds.set_title(f"{outcome.usd:,.0f} USD, {outcome.late_share:.3%} late, {outcome.lost_machines} machines lost")
    queue.plot(hours, np.asarray(outcome.queued) / 1000, color="tab:red", linewidth=0.7)
    queue.set_ylabel("waiting, thousand tokens")
    queue.set_xlabel("hours")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
