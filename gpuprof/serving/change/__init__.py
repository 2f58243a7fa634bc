"""Changing a server while it runs: new maps, standbys, replanning."""
