"""The command line: one file per verb, which parses options, calls the library and renders the result."""
