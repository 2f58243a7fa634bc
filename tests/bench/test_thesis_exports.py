"""What the exports of the thesis's models must have to be exported at all."""

import sys
from pathlib import Path

import pytest

from bench import thesis_exports


@pytest.mark.parametrize("name", thesis_exports.TEXTS)
def test_every_classifier_knows_the_token_that_fills_texts_of_a_batch(name: str) -> None:
    pytest.importorskip("transformers")
    assert thesis_exports.text_config(name).pad_token_id is not None


def test_images_without_torchvision_are_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(thesis_exports, "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["thesis_exports", "-o", str(tmp_path), "--models", "bert", "alexnet"])
    with pytest.raises(SystemExit) as refused:
        thesis_exports.main()
    assert refused.value.code == 2 and "torchvision is missing" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
