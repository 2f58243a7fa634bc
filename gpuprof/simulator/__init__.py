"""Discrete-event simulation: replays arrivals against a deployment map, without a device."""
