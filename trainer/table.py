"""A roll call as a table: node, host, verdict, and the facts in which a node differs from most."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_RED, _YELLOW, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[0m"
_HEAD = ("node", "host", "address", "MB/s", "verdict")


def table(report: Mapping[str, Any], colour: bool = False) -> str:
    """The text of a report (rollcall.json).

    Args:
        colour: facts that must agree and do not in red, what may differ and does in yellow.
    """
    nodes = report["nodes"]
    rows = [_HEAD, *(_row(node) for node in nodes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD) - 1)]
    culprit = _culprit(report["fault"])
    verdicts = ["verdict"]
    for node in nodes:
        differs = _verdict(node, nodes, colour)
        verdicts.append(": ".join(filter(None, ("FAULT", differs))) if str(node["node_rank"]) == culprit else differs or "ok")
    lines = []
    for row, verdict in zip(rows, verdicts, strict=True):
        lines.append("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=False)) + f"  {verdict}")
    told = [f"warning: {warning}" for warning in report["warnings"]]
    for node in nodes:
        told += [f"warning: node {node['node_rank']} ({node['host']}): {warning}" for warning in node["warnings"]]
    end = report["fault"] or f"the job can start: {len(nodes)} nodes, roll call in {report['seconds']:.1f} s"
    return "\n".join([*lines, *told, end])


def _row(node: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    rate = node.get("received")
    return str(node["node_rank"]), node["host"], node["address"] or "-", f"{rate / 1e6:.0f}" if rate else "-", ""


def _verdict(node: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], colour: bool) -> str:
    found = []
    for kind, paint in (("facts", _RED), ("traits", _YELLOW)):
        for item, value in node[kind].items():
            usual = Counter(other[kind].get(item) for other in nodes).most_common(1)[0][0]
            if value != usual:
                found.append(f"{paint}{item} {value}{_PLAIN}" if colour else f"{item} {value}")
    return ", ".join(found)


def _culprit(fault: str | None) -> str:
    """The node rank that a fault names; a fault of a rank is none of the roll call's."""
    found = re.match(r"FAULT \S+ host=\S+ node_rank=(\d+): ", fault or "")
    return found[1] if found else ""
