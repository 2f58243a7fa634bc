"""The command line: one file a verb, each parsing, calling the library and rendering."""
