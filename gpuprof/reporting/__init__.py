"""Pictures of what was measured, predicted, placed, simulated and served, as HTML, SVG and PNG."""
