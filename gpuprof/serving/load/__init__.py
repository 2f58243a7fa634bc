"""The other end: sending traffic to a server, and setting what came back beside what was predicted."""
