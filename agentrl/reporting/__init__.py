"""Reporting of a run: the display, notes, the summary, the curve."""
