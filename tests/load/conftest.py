from __future__ import annotations

from tests.serving.conftest import null_server

__all__ = ["null_server"]
