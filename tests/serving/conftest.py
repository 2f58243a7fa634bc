from collections.abc import Iterator

import pytest

from tests.serving.running import RunningServer, map_of, replica, running


@pytest.fixture(scope="package")
def null_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    document = map_of(
        {"small": "null:4", "large": "null:600k"}, [replica("small", batch=4, max_wait_ms=1.0), replica("large")]
    )
    with running(tmp_path_factory.mktemp("null"), document, "--max-body-mb", "4") as server:
        yield server
