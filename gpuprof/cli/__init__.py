"""The command line: a file for each verb, which parses options, calls the library and renders the result."""
