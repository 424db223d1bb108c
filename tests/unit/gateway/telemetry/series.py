"""Parsing of /metrics."""

from prometheus_client.parser import text_string_to_metric_families

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Scrape:
    """One response of /metrics, parsed by Prometheus' client."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples: Series = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of all samples with this name and at least these labels; 0 if there are none."""
        return sum(self.values(name, **labels))

    def values(self, name: str, **labels: str) -> list[float]:
        wanted = set(labels.items())
        return [value for (found, has), value in self.samples.items() if found == name and wanted <= has]

    def label_values(self) -> set[str]:
        return {value for _, labels in self.samples for _, value in labels}

    def growing(self) -> Series:
        """Return the samples that must never decrease."""
        names = {
            sample.name
            for family in self.families.values()
            if family.type in {"counter", "histogram"} and not family.name.startswith(("process_", "python_"))
            for sample in family.samples
        }
        return {key: value for key, value in self.samples.items() if key[0] in names}
