"""The architectures of the zoo: name, origin, size, inputs, and extra needed for building."""

from __future__ import annotations

from dataclasses import dataclass

from gpuprof.errors import unknown_name

ONNX, TRANSFORMERS, OURS = "onnx", "transformers", "gpuprof"


@dataclass(frozen=True, slots=True)
class ZooArchitecture:
    """A network of the zoo."""

    name: str
    #: Source of the definition: ``"onnx"`` (shipped with that package), ``"transformers"`` (exported from the library's
    #: configuration and code) or ``"gpuprof"`` (not a published network). Networks named random draw their layers for
    #: each seed; their size and input are for seed 0.
    origin: str
    stem: str  #: Name in the origin.
    parameters: int  #: Number of parameters, statistics of normalisations included.
    input: str  #: Names and shapes of its inputs.
    needs: str = ""  #: Extra of gpuprof needed for building; empty: none.


_IMAGE = "{} [batch, 3, 224, 224]"


def _light(name: str, stem: str, parameters: int, data: str = "data_0") -> ZooArchitecture:
    return ZooArchitecture(name, ONNX, stem, parameters, _IMAGE.format(data))


def _export(name: str, parameters: int, data: str) -> ZooArchitecture:
    return ZooArchitecture(name, TRANSFORMERS, name, parameters, data, "export")


_PIXELS = _IMAGE.format("pixel_values")
_TOKENS = "input_ids, attention_mask [batch, 128]"

_ALL = (
    _light("alexnet", "bvlc_alexnet", 60_965_224),
    _light("densenet121", "densenet121", 8_146_152),
    _light("inception_v1", "inception_v1", 6_998_552),
    _light("inception_v2", "inception_v2", 11_234_792),
    _light("resnet50", "resnet50", 25_610_152, "gpu_0/data_0"),
    _light("shufflenet", "shufflenet", 1_420_152, "gpu_0/data_0"),
    _light("squeezenet", "squeezenet", 1_235_496),
    _light("vgg19", "vgg19", 143_667_240),
    _light("zfnet512", "zfnet512", 87_250_536, "gpu_0/data_0"),
    ZooArchitecture("mlp", OURS, "mlp", 7_912_458, "input [batch, 784]"),
    ZooArchitecture("transformer_encoder", OURS, "transformer_encoder", 4_228_112, "input_ids [batch, 64]"),
    ZooArchitecture("lstm_classifier", OURS, "lstm_classifier", 2_105_360, "input_ids [batch, 64]"),
    ZooArchitecture("unet", OURS, "unet", 949_888, "input [batch, 3, 128, 128]"),
    ZooArchitecture("random_cnn", OURS, "random_cnn", 1_525_274, "input [batch, 3, 192, 192]"),
    ZooArchitecture("random_transformer", OURS, "random_transformer", 7_348_755, "input_ids [batch, 16]"),
    ZooArchitecture("random_rnn", OURS, "random_rnn", 1_568_784, "input_ids [batch, 16]"),
    ZooArchitecture("random_mlp", OURS, "random_mlp", 2_385_098, "input [batch, 64]"),
    _export("bert_base", 109_398_534, _TOKENS),
    _export("gpt2", 124_320_008, _TOKENS),
    _export("t5_small", 60_621_832, f"decoder_input_ids, {_TOKENS}"),
    _export("bloom_560m", 559_065_111, _TOKENS),
    _export("xlnet_base", 116_743_686, _TOKENS),
    _export("vit_base", 86_482_950, _PIXELS),
    _export("resnet18", 11_684_712, _PIXELS),
    _export("resnet101", 44_496_488, _PIXELS),
    _export("mobilenet_v2", 3_486_818, _PIXELS),
    _export("efficientnet_b7", 66_118_400, "pixel_values [batch, 3, 600, 600]"),
)

#: Every architecture by its name.
ARCHITECTURES = {architecture.name: architecture for architecture in _ALL}


def find_architecture(name: str) -> ZooArchitecture:
    """Return an architecture by name. Raises `InputError` for an unknown name; the message gives the nearest."""
    if name not in ARCHITECTURES:
        raise unknown_name("network of the zoo", name, list(ARCHITECTURES))
    return ARCHITECTURES[name]
