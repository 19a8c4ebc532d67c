"""What a run tells while it goes: the display, notes, the summary, the curve."""
