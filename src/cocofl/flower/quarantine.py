"""Whom the server no longer asks: nodes whose updates stood out too often."""

from __future__ import annotations

from cocofl.runlog import RoundRecord

WINDOW = 20
"""So many rounds back an outlier counts: one that is seldom far off may just have other data."""


class Quarantine:
    """Learns from the records of rounds, and from nothing else: a run that is resumed knows it too.

    A node that was an outlier ``limit`` times within :data:`WINDOW` rounds is no longer asked in
    this run. With a limit of 0 that happens to nobody.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._outliers: dict[int, list[int]] = {}
        self.held: dict[int, list[int]] = {}
        """By node, in which rounds it stood out."""

    def add(self, record: RoundRecord) -> list[int]:
        """Take in a round; the nodes that are held because of it."""
        figures, new = record.figures or (), []
        outliers = [one.device for one in figures if one.outlier]
        # Where half of the nodes are outliers it is not known from what they differ.
        if not self._limit or 2 * len(outliers) >= len(figures):
            return []
        for node in outliers:
            before = self._outliers.get(node, [])
            recent = [number for number in before if number > record.round - WINDOW]
            self._outliers[node] = recent = [*recent, record.round]
            if len(recent) >= self._limit and node not in self.held:
                self.held[node] = recent
                new.append(node)
        return new
