"""Networks exported by ``torch.onnx``: of transformers, in small configurations, and those that it lacks."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.model_kinds import Kind

Axes = Mapping[int, str]
_BATCH: Axes = {0: "batch"}
_TEXT: Axes = {0: "batch", 1: "sequence"}


def export(
    model: Any, examples: Mapping[str, Any], path: Path, free: Mapping[str, Axes], fields: Sequence[str] = (),
    is_counted: bool = False,
) -> None:  # fmt: skip
    """Export a model: called with keywords what ``fields`` of its result hold, else what it returns.

    Parameters
    ----------
    free : mapping of str to mapping of int to str
        By input the names of its free dimensions.
    is_counted : bool
        Whether the exporter is left to name them: ``s20``.
    """
    import torch

    names = list(examples)

    class PositionalCall(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *values: Any) -> Any:
            if not fields:
                return self.model(*values)
            result = self.model(**dict(zip(names, values, strict=True)))
            return tuple(getattr(result, name) for name in fields)

    dims: dict[str, Any] = {}
    shapes = tuple(
        {
            axis: torch.export.Dim.AUTO if is_counted else dims.setdefault(dim, torch.export.Dim(dim))
            for axis, dim in free.get(name, {}).items()
        }
        for name in names
    )
    silent = io.StringIO()
    logging.disable(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(silent),
            contextlib.redirect_stderr(silent),
            torch.no_grad(),
        ):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                PositionalCall().eval(), tuple(examples.values()), str(path), dynamo=True, dynamic_shapes=(shapes,),
                input_names=names, opset_version=18, external_data=False, verbose=False,
            )  # fmt: skip
    finally:
        logging.disable(logging.NOTSET)


def _of_transformers(config: str, model: str, **settings: Any) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, model)(
        getattr(transformers, f"{config}Config")(**settings, attn_implementation="eager")
    ).eval()


def _classify_images(family: str, side: int, path: Path, **settings: Any) -> None:
    import torch

    model = _of_transformers(family, f"{family}ForImageClassification", num_labels=10, **settings)
    export(model, {"pixel_values": torch.rand(2, 3, side, side)}, path, {"pixel_values": _BATCH}, ["logits"])


def _read_text(
    config: str, name: str, path: Path, fields: Sequence[str] = ("last_hidden_state",), **settings: Any
) -> None:
    import torch

    model = _of_transformers(config, name, **settings)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    ids = torch.randint(0, 100, (2, 16))
    export(
        model,
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        path,
        {"input_ids": _TEXT, "attention_mask": _TEXT},
        fields,
    )


def _whisper(path: Path) -> None:
    import torch

    model = _of_transformers(
        "Whisper", "WhisperModel", d_model=32, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=100, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    export(
        model.encoder,
        {"input_features": torch.rand(2, 80, 3000)},
        path,
        {"input_features": _BATCH},
        ["last_hidden_state"],
    )


def _wav2vec2(path: Path) -> None:
    import torch

    model = _of_transformers(
        "Wav2Vec2", "Wav2Vec2Model", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        conv_dim=(32,) * 7,
    )  # fmt: skip
    export(
        model,
        {"input_values": torch.rand(2, 16000)},
        path,
        {"input_values": {0: "batch", 1: "samples"}},
        ["last_hidden_state"],
    )


def _llama_step(path: Path, is_counted: bool = False) -> None:
    """Write one step of a decoder: a token for each text, and the keys and values of those before it.

    With the dimensions that the exporter counts the mask's length has a name of its own, and that of the new token is
    free though the model takes no other.
    """
    import torch
    from transformers import DynamicCache

    layers, heads, width = 2, 2, 16
    model = _of_transformers(
        "Llama", "LlamaForCausalLM", hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=heads, head_dim=width, vocab_size=500,
    )  # fmt: skip

    class DecoderStep(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, mask: Any, *past: Any) -> Any:
            cache = DynamicCache([(past[2 * layer], past[2 * layer + 1]) for layer in range(layers)])
            found = self.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
            kept = [one for layer in found.past_key_values.layers for one in (layer.keys, layer.values)]
            return (found.logits, *kept)

    past = {f"past_{name}_{layer}": torch.rand(2, heads, 7, width) for layer in range(layers) for name in ("k", "v")}
    examples = {
        "input_ids": torch.randint(0, 100, (2, 1)),
        "attention_mask": torch.ones(2, 8, dtype=torch.long),
        **past,
    }
    free: dict[str, Axes] = {"input_ids": _TEXT if is_counted else _BATCH, "attention_mask": {0: "batch", 1: "total"}}
    free |= {key: {0: "batch", 2: "past"} for key in past}
    export(DecoderStep().eval(), examples, path, free, is_counted=is_counted)


def _clip(path: Path) -> None:
    import torch

    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "vocab_size": 100, "eos_token_id": 99, "bos_token_id": 98}  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": 64, "patch_size": 16}  # fmt: skip
    model = _of_transformers("CLIP", "CLIPModel", text_config=text, vision_config=vision, projection_dim=16)
    ids = torch.randint(0, 90, (3, 16))
    text_axes: Axes = {0: "text_batch", 1: "sequence"}
    export(
        model,
        {"input_ids": ids, "pixel_values": torch.rand(2, 3, 64, 64), "attention_mask": torch.ones_like(ids)},
        path,
        {"input_ids": text_axes, "pixel_values": {0: "image_batch"}, "attention_mask": text_axes},
        ["logits_per_image"],
    )


def _blocks() -> dict[str, Callable[[], Any]]:
    """Return what makes the networks that transformers lacks."""
    import torch
    from torch import nn

    def conv(taken: int, given: int, stride: int = 1, kernel: int = 3, groups: int = 1) -> Any:
        layer = nn.Conv2d(taken, given, kernel, stride, kernel // 2, groups=groups, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(given), nn.SiLU())

    class Squeeze(nn.Module):  # type: ignore[misc]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.gate = nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width // 4, 1), nn.SiLU(), nn.Conv2d(width // 4, width, 1),
                nn.Sigmoid(),
            )  # fmt: skip

        def forward(self, x: Any) -> Any:
            return x * self.gate(x)

    def efficientnet_v2() -> Any:
        fused = nn.Sequential(conv(16, 64), nn.Conv2d(64, 24, 1), nn.BatchNorm2d(24))
        mobile = nn.Sequential(conv(24, 96, kernel=1), conv(96, 96, 2, groups=96), Squeeze(96), nn.Conv2d(96, 32, 1))
        return nn.Sequential(
            conv(3, 16, 2), fused, mobile, conv(32, 64, kernel=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(64, 10),
        )  # fmt: skip

    class Yolo(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(conv(3, 16, 2), conv(16, 32, 2), conv(32, 32, 2))
            self.deep = conv(32, 64, 2)
            self.heads = nn.ModuleList([nn.Conv2d(96, 15, 1), nn.Conv2d(64, 15, 1)])

        def forward(self, images: Any) -> Any:
            near = self.stem(images)
            far = self.deep(near)
            both = torch.cat([near, nn.functional.interpolate(far, scale_factor=2.0, mode="nearest")], 1)
            found = [head(x).flatten(2) for head, x in zip(self.heads, (both, far), strict=True)]
            boxes = torch.cat(found, 2).transpose(1, 2)
            return torch.cat([boxes[..., :4], boxes[..., 4:].sigmoid()], 2)

    class UNet(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.down, self.up = conv(3, 16), conv(16, 32, 2), nn.ConvTranspose2d(32, 16, 2, 2)
            self.last = nn.Conv2d(32, 2, 1)

        def forward(self, images: Any) -> Any:
            wide = self.first(images)
            return self.last(torch.cat([wide, self.up(self.down(wide))], 1))

    class Detector(nn.Module):  # type: ignore[misc]
        """One picture in, boxes and scores of its anchors out, as torchvision's detectors before they select."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(conv(3, 16, 2), conv(16, 16, 2, groups=16), conv(16, 32, 2, kernel=1))
            self.boxes, self.scores = nn.Conv2d(32, 24, 3, padding=1), nn.Conv2d(32, 30, 3, padding=1)

        def forward(self, image: Any) -> Any:
            x = self.body(image[None])
            boxes = self.boxes(x).permute(0, 2, 3, 1).reshape(-1, 4)
            return boxes, self.scores(x).permute(0, 2, 3, 1).reshape(-1, 5).softmax(1)

    class Recurrent(nn.Module):  # type: ignore[misc]
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.cells, self.last = kind(16, 32, batch_first=True), nn.Linear(32, 4)

        def forward(self, steps: Any) -> Any:
            return self.last(self.cells(steps)[0][:, -1])

    return {
        "efficientnet_v2": efficientnet_v2,
        "yolo": Yolo,
        "unet": UNet,
        "detector": Detector,
        "lstm": partial(Recurrent, nn.LSTM),
        "gru": partial(Recurrent, nn.GRU),
        "bf16": lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(torch.bfloat16),
    }


def _of_blocks(name: str, shape: Sequence[int], free: Axes, path: Path, given: str = "images") -> None:
    import torch

    torch.manual_seed(0)
    example = torch.rand(*shape)
    example = example.to(torch.bfloat16) if name == "bf16" else example
    export(_blocks()[name]().eval(), {given: example}, path, {given: free})


def write_unet(path: Path) -> None:
    """Write the U-Net, of which other kinds are made."""
    _of_blocks("unet", (2, 3, 64, 64), {0: "batch", 2: "height", 3: "width"}, path)


def write_bert(path: Path) -> None:
    """Write the DistilBERT, of which other kinds are made."""
    _read_text("DistilBert", "DistilBertModel", path, dim=64, n_layers=2, n_heads=4, hidden_dim=128, vocab_size=500)


_SMALL: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_T5: dict[str, Any] = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2, "vocab_size": 500}

NETWORKS = (
    Kind("ConvNeXt", partial(_classify_images, "ConvNext", 64, depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 48, 64])),
    Kind(
        "RegNet",
        partial(_classify_images, "RegNet", 64, embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1],
                groups_width=8),
    ),
    Kind("Swin", partial(_classify_images, "Swin", 64, image_size=64, embed_dim=16, depths=[1, 1], num_heads=[2, 4])),
    Kind("ViT", partial(_classify_images, "ViT", 64, image_size=64, patch_size=16, **_SMALL)),
    Kind("EfficientNetV2", partial(_of_blocks, "efficientnet_v2", (2, 3, 64, 64), _BATCH)),
    Kind("YOLO-like detector", partial(_of_blocks, "yolo", (2, 3, 64, 64), _BATCH)),
    Kind("SegFormer", partial(
        _classify_images, "Segformer", 64, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[4, 2], hidden_sizes=[16, 32],
        patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2])),
    Kind("DINOv2", partial(_classify_images, "Dinov2", 56, image_size=56, patch_size=14, **_SMALL)),
    Kind("U-Net, free sides", write_unet),
    Kind("detector of one picture [3, H, W]", partial(_of_blocks, "detector", (3, 64, 64), {1: "height", 2: "width"})),
    Kind("DistilBERT", write_bert),
    Kind("Llama, one step with its cache", _llama_step, {"past": 15}),
    Kind("Llama, one step, dimensions counted", partial(_llama_step, is_counted=True)),
    Kind("GPT-2", partial(_read_text, "GPT2", "GPT2LMHeadModel", fields=("logits",), n_embd=64, n_layer=2, n_head=4,
                          vocab_size=500)),
    Kind("T5 encoder", partial(_read_text, "T5", "T5EncoderModel", **_T5)),
    Kind("Whisper encoder", _whisper),
    Kind("wav2vec2", _wav2vec2, {"samples": 16_000}),
    Kind("CLIP, two batches", _clip),
    Kind("LSTM", partial(_of_blocks, "lstm", (2, 20, 16), {0: "batch", 1: "sequence"}, given="steps")),
    Kind("GRU", partial(_of_blocks, "gru", (2, 20, 16), {0: "batch", 1: "sequence"}, given="steps")),
    Kind("bfloat16 network", partial(_of_blocks, "bf16", (2, 64), _BATCH, given="x")),
)  # fmt: skip
