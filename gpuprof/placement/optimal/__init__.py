"""The policy of our own: integer programs over patterns, with a bound."""
