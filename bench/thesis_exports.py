"""Exports the models of the thesis's Table A.1 with random weights: torchvision's networks, transformers' classifiers.

    python -m bench.thesis_exports -o DIR [--models NAME …]

As the thesis ran them (tables 6.2 and 6.3): images of 3 x 224 x 224, texts of 512 tokens, attention in pieces, batch
normalisations as ops of their own. Needs torchvision (0.19, as in the thesis) beside gpuprof's extra ``export``; its
compiled operators are not needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.normalised_networks import write_normalised

IMAGES = (
    "alexnet", "densenet121", "efficientnet_b7", "inception_v3", "mobilenet_v2", "resnet50", "resnext50_32x4d", "vgg19",
)  # fmt: skip
#: Name of the table → classes of transformers and what differs from the configuration's defaults.
TEXTS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "bert": ("Bert", {}),
        "bloom_560": (
            "Bloom",
            {"vocab_size": 250680, "hidden_size": 1024, "n_layer": 24, "n_head": 16, "pad_token_id": 3},
        ),
        "gpt2": ("GPT2", {"pad_token_id": 0}),
        "t5": ("T5", {"decoder_start_token_id": 0}),
        "xlnet": ("XLNet", {"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072}),
    }
)
_SIDE, _TOKENS, _EXAMPLES, _OPSET = 224, 512, 2, 18


def main() -> int:
    """Write the exports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=[*IMAGES, *TEXTS], choices=[*IMAGES, *TEXTS])
    args = parser.parse_args()
    if find_spec("torchvision") is None and not set(args.models).isdisjoint(IMAGES):
        parser.error(
            "torchvision is missing, of which the images' networks come (install it, or name others: --models)"
        )
    args.output.mkdir(parents=True, exist_ok=True)
    for name in args.models:
        path = args.output / f"{name}.onnx"
        export(*(_image_model(name) if name in IMAGES else _text_model(name)), path)
        print(path)
    return 0


def _image_model(name: str) -> tuple[Any, Any]:
    import torch

    if not hasattr(torch.ops.torchvision, "nms"):  # declared by the compiled operators, which may not be there
        declared = torch.library.Library("torchvision", "DEF")  # as long as it is held
        declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torchvision = import_module("torchvision")  # nothing else here needs it
    return torchvision.models.get_model(name, weights=None).eval(), torch.randn(_EXAMPLES, 3, _SIDE, _SIDE)


def text_config(name: str) -> Any:
    """Return the configuration of a classifier of texts."""
    import transformers

    family, settings = TEXTS[name]
    config = getattr(transformers, f"{family}Config")(**settings, num_labels=2, attn_implementation="eager")
    config.use_cache = False
    return config


def _text_model(name: str) -> tuple[Any, Any]:
    import torch
    import transformers

    model = getattr(transformers, f"{TEXTS[name][0]}ForSequenceClassification")(text_config(name)).eval()

    class ClassLogits(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any) -> Any:
            return self.model(ids).logits

    ids = torch.randint(2, 100, (_EXAMPLES, _TOKENS))
    ids[:, -1] = 1  # T5 reads where texts end
    return ClassLogits().eval(), ids


def export(model: Any, example: Any, path: Path) -> None:
    """Write ``model`` with a free batch, its weights beside it."""
    import torch

    with torch.no_grad():
        program = torch.onnx.export(
            model,
            (example,),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            input_names=["input"],
            output_names=["logits"],
            opset_version=_OPSET,
            optimize=True,
            verbose=False,
        )
    assert program is not None
    program.save(str(path), external_data=True)
    if any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules()):
        write_normalised(path)


if __name__ == "__main__":
    raise SystemExit(main())
