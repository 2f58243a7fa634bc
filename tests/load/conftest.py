from tests.serving.conftest import null_server

__all__ = ["null_server"]
