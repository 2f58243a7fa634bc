"""The router: which replica gets a request, when a batch goes, what becomes of requests whose worker died."""
