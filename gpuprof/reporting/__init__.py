"""Charts of measurements, predictions, maps, simulations and load tests, as HTML, SVG and PNG."""
