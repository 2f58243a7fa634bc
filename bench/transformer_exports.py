"""Exports the transformers that NeuSight measured, with one and with two layers and random weights.

    python -m bench.transformer_exports CONFIGURATIONS -o DIR

CONFIGURATIONS holds NeuSight's ``config_<model>.json``. Attention is exported in pieces, as it was measured. Layers are
alike, so that the times of one and of two tell those of any number; a whole one is written with ``--layers 24``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

LENGTHS = {"bert_large": 512, "gpt2_large": 1024, "opt_13": 2048, "gpt3_xl": 2048, "gpt3_27": 2048}


def main() -> int:
    """Write the exports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configurations", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=list(LENGTHS), choices=list(LENGTHS))
    parser.add_argument("--layers", type=int, nargs="*", default=[1, 2])
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for name in args.models:
        configuration = json.loads((args.configurations / f"config_{name}.json").read_text(encoding="utf-8"))
        for layers in args.layers:
            path = args.output / f"{name}-{layers}.onnx"
            export(make_model(name, configuration, layers), LENGTHS[name], path)
            print(path)
    return 0


def make_model(name: str, configuration: dict[str, Any], layers: int) -> Any:
    """Return the network that NeuSight measured, with so many layers and random weights."""
    import transformers

    if name == "bert_large":
        config: Any = transformers.BertConfig(**{**configuration, "num_hidden_layers": layers, "num_labels": 2})
        kind: Any = transformers.BertForSequenceClassification
    elif name == "opt_13":
        config = transformers.OPTConfig(**{**configuration, "num_hidden_layers": layers})
        kind = transformers.OPTForCausalLM
    else:
        config = transformers.GPT2Config(**{**configuration, "n_layer": layers})
        kind = transformers.GPT2LMHeadModel
    config._attn_implementation = "eager"
    config.use_cache = False
    return kind(config).eval()


def export(model: Any, length: int, path: Path) -> None:
    """Export ``model`` with a free batch."""
    import torch

    class Logits(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any) -> Any:
            return self.model(input_ids=input_ids).logits

    tokens = torch.zeros(2, length, dtype=torch.int64)
    batch = torch.export.Dim("batch", min=1, max=512)
    torch.onnx.export(
        Logits(),
        (tokens,),
        str(path),
        dynamo=True,
        dynamic_shapes={"input_ids": {0: batch}},
        input_names=["input_ids"],
        opset_version=20,
        external_data=True,
        verbose=False,
    )


if __name__ == "__main__":
    raise SystemExit(main())
