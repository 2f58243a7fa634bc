"""Each distinct op once, as a model of its own."""
