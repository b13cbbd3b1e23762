"""A plot of an ablation as one SVG file: a panel for each measure, a dot and its interval for each variant."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from molt.ablate.report import Report, Row

PANELS = ("effective_share", "rejected_share", "sample_share", "signal_std", "sign_agreement", "length_correlation")
ROW, PANEL, LABEL, TOP = 16, 180, 330, 44
"""Pixels: height of a row, width of a panel, width of the labels, height of the head."""


def write_plot(report: Report, path: Path) -> None:
    """Write the plot; the baseline's row is drawn in bold."""
    path.write_text(svg(report), encoding="utf-8")


def svg(report: Report) -> str:
    """The plot as text."""
    width, height = LABEL + PANEL * len(PANELS) + 20, TOP + ROW * len(report.rows) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="10">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="8" y="16" font-size="12">{escape(report.run)}: {report.num_steps} steps, {report.n_sampled} sampled tokens</text>',
    ]
    for place, row in enumerate(report.rows):
        weight = "bold" if row.variant == report.baseline else "normal"
        y = TOP + ROW * place + 11
        parts.append(f'<text x="{LABEL - 8}" y="{y}" text-anchor="end" font-weight="{weight}">{escape(row.variant)}</text>')
    for place, name in enumerate(PANELS):
        parts += _panel(name, report.rows, LABEL + PANEL * place, height)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(name: str, rows: Sequence[Row], left: int, height: int) -> list[str]:
    found = [row.measures[name] for row in rows]
    ends = [end for estimate in found for end in (estimate.value, estimate.low, estimate.high) if end is not None]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    span = high - low if high > low else max(abs(high), 1.0)
    low, high = low - 0.05 * span, high + 0.05 * span

    def x(value: float) -> float:
        return round(left + 8 + (value - low) / (high - low) * (PANEL - 24), 2)

    parts = [
        f'<text x="{left + 8}" y="30" font-weight="bold">{escape(name.replace("_", " "))}</text>',
        f'<text x="{left + 8}" y="41" fill="#666">{low:.3g}</text>',
        f'<text x="{left + PANEL - 16}" y="41" fill="#666" text-anchor="end">{high:.3g}</text>',
        f'<line x1="{left}" y1="{TOP}" x2="{left}" y2="{height - 16}" stroke="#ddd"/>',
    ]
    for place, estimate in enumerate(found):
        y = TOP + ROW * place + 8
        if estimate.low is not None and estimate.high is not None:
            parts.append(f'<line x1="{x(estimate.low)}" y1="{y}" x2="{x(estimate.high)}" y2="{y}" stroke="#4a7bb5" stroke-width="2"/>')
        if estimate.value is not None:
            parts.append(f'<circle cx="{x(estimate.value)}" cy="{y}" r="3" fill="#1b3a5c"/>')
    return parts
