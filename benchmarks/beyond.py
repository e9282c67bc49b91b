"""Which networks beyond image classifiers can be pruned: segmentation, detection, video, flow, language, audio.

    python benchmarks/beyond.py [--only smp:Unet ...] [--timeout 120] [--out results/coverage-beyond.json]

Random weights, small inputs, transformers' networks of small configurations; of the packages those that are installed
(transformers, segmentation-models-pytorch, ultralytics, monai). Each network runs in a process of its own: a Pruner
at 50 %, `compact`, which proves it, and `measure`. One that is refused gives the refusal's words.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Made = Callable[[], tuple[Any, Any]]
"""Makes a network, and an example of its input."""

WIDE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
TEXT = {**WIDE, "vocab_size": 100, "max_position_embeddings": 64}
SHARED = {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0}
"""Heads of keys and values, each for two of queries."""
SIGHT = {**WIDE, "image_size": 64, "patch_size": 8}


def pixels(size: int, channels: int = 3, dims: int = 2) -> Any:
    import torch

    return torch.rand(1, channels, *[size] * dims)


def from_torchvision() -> dict[str, Made]:
    kinds: dict[str, tuple[Any, str]] = {
        "segmentation": (
            pixels(128),
            "fcn_resnet50 deeplabv3_resnet50 deeplabv3_mobilenet_v3_large lraspp_mobilenet_v3_large",
        ),
        "detection": (
            ([pixels(128)[0]],),
            "fasterrcnn_resnet50_fpn fasterrcnn_mobilenet_v3_large_fpn maskrcnn_resnet50_fpn keypointrcnn_resnet50_fpn "
            "retinanet_resnet50_fpn fcos_resnet50_fpn ssd300_vgg16 ssdlite320_mobilenet_v3_large",
        ),
        "video": (pixels(64, dims=3)[:, :, :16], "r3d_18 r2plus1d_18 mc3_18 swin3d_t"),
        "optical_flow": ((pixels(128), pixels(128)), "raft_small"),
    }

    def make(kind: str, name: str, example: Any) -> tuple[Any, Any]:
        untrained = {"weights": None, **({"weights_backbone": None} if kind in ("segmentation", "detection") else {})}
        return getattr(import_module(f"torchvision.models.{kind}"), name)(**untrained), example

    return {
        f"torchvision:{name}": partial(make, kind, name, example)
        for kind, (example, names) in kinds.items()
        for name in names.split()
    }


def from_transformers() -> dict[str, Made]:
    import torch
    import transformers as tf

    words = torch.randint(3, 100, (1, 12))
    text: dict[str, dict[str, Any]] = {
        "BertForSequenceClassification": TEXT,
        "RobertaForMaskedLM": TEXT,
        "DebertaV2Model": TEXT,
        "AlbertModel": {**TEXT, "embedding_size": 32},
        "DistilBertModel": {"vocab_size": 100, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128},
        "T5EncoderModel": {"vocab_size": 100, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4},
        "GPT2LMHeadModel": {"vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4},
        "GPTNeoXForCausalLM": TEXT,
        "LlamaForCausalLM": SHARED,
        "MistralForCausalLM": SHARED,
        "Qwen2ForCausalLM": SHARED,
        "Phi3ForCausalLM": SHARED,
        "MixtralForCausalLM": SHARED,
    }
    sight: dict[str, dict[str, Any]] = {
        "ViTForImageClassification": SIGHT,
        "Dinov2Model": {**SIGHT, "use_swiglu_ffn": True},
        "ConvNextForImageClassification": {},
        "SegformerForSemanticSegmentation": {},
    }

    def make(name: str, sizes: dict[str, Any], example: dict[str, Any]) -> tuple[Any, Any]:
        kind = getattr(tf, name)
        return kind(kind.config_class(**sizes)), example

    def whisper() -> tuple[Any, Any]:
        layers = {"layers": 2, "attention_heads": 4, "ffn_dim": 128}
        sizes = {f"{part}_{key}": value for part in ("encoder", "decoder") for key, value in layers.items()}
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        config = tf.WhisperConfig(
            d_model=64, num_mel_bins=16, max_source_positions=20, vocab_size=100, **sizes, **tokens
        )
        example = {"input_features": torch.randn(1, 16, 40), "decoder_input_ids": words[:, :5]}
        return tf.WhisperForConditionalGeneration(config), example

    def wav2vec2() -> tuple[Any, Any]:
        heard = {"conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
        config = tf.Wav2Vec2Config(**WIDE, **heard, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4)
        return tf.Wav2Vec2ForCTC(config), {"input_values": torch.randn(1, 800)}

    families: dict[str, Made] = {
        **{name: partial(make, name, sizes, {"input_ids": words}) for name, sizes in text.items()},
        **{name: partial(make, name, sizes, {"pixel_values": pixels(64)}) for name, sizes in sight.items()},
        "WhisperForConditionalGeneration": whisper,
        "Wav2Vec2ForCTC": wav2vec2,
    }
    return {f"transformers:{name}": each for name, each in families.items()}


def from_smp() -> dict[str, Made]:
    import segmentation_models_pytorch as smp

    def make(kind: str) -> tuple[Any, Any]:
        return getattr(smp, kind)("resnet18", encoder_weights=None), pixels(256)

    kinds = [
        "Unet",
        "UnetPlusPlus",
        "Linknet",
        "FPN",
        "PSPNet",
        "PAN",
        "DeepLabV3Plus",
        "MAnet",
        "UPerNet",
        "Segformer",
    ]
    return {f"smp:{kind}": partial(make, kind) for kind in kinds}


def from_ultralytics() -> dict[str, Made]:
    from ultralytics.nn import tasks

    def make(kind: str, name: str) -> tuple[Any, Any]:
        return getattr(tasks, f"{kind}Model")(f"{name}.yaml", verbose=False), pixels(320)

    kinds = dict.fromkeys(
        ["yolov3-tiny", "yolov5n", "yolov8n", "yolov9t", "yolov10n", "yolo11n", "yolo12n"], "Detection"
    )
    kinds |= {"yolov8n-seg": "Segmentation", "yolov8n-pose": "Pose", "yolov8n-cls": "Classification"}
    return {f"ultralytics:{name}": partial(make, kind, name) for name, kind in kinds.items()}


def from_monai() -> dict[str, Made]:
    from monai.networks import nets

    deep = {"filters": [16, 32, 64], "deep_supervision": True}
    small = {"spatial_dims": 2, "hidden_size": 96, "mlp_dim": 192, "num_heads": 4}
    return {
        "monai:UNet": lambda: (nets.UNet(2, 1, 2, (16, 32, 64), (2, 2), num_res_units=2), pixels(64, 1)),
        "monai:BasicUNet": lambda: (nets.BasicUNet(3, 1, 2, features=(8, 8, 16, 16, 32, 8)), pixels(32, 1, 3)),
        "monai:AttentionUnet": lambda: (nets.AttentionUnet(2, 1, 2, (16, 32, 64), (2, 2)), pixels(64, 1)),
        "monai:SegResNet": lambda: (nets.SegResNet(spatial_dims=2), pixels(64, 1)),
        "monai:DynUNet": lambda: (nets.DynUNet(2, 1, 2, [3] * 3, [1, 2, 2], [2, 2], **deep), pixels(64, 1)),
        "monai:UNETR": lambda: (nets.UNETR(1, 2, 64, **small), pixels(64, 1)),
        "monai:SwinUNETR": lambda: (nets.SwinUNETR(1, 2, feature_size=12, spatial_dims=2), pixels(64, 1)),
    }


PACKAGES: dict[str, tuple[str, Callable[[], dict[str, Made]]]] = {
    "torchvision": ("torchvision", from_torchvision),
    "transformers": ("transformers", from_transformers),
    "smp": ("segmentation-models-pytorch", from_smp),
    "ultralytics": ("ultralytics", from_ultralytics),
    "monai": ("monai", from_monai),
}
"""By the first part of a network's name."""


def one(name: str) -> dict[str, Any]:
    """Prune one network, in this process."""
    import torch

    import growprune as gp

    torch.manual_seed(0)
    model, example = PACKAGES[name.partition(":")[0]][1]()[name]()
    model.eval()
    start = time.perf_counter()
    try:
        pruner = gp.Pruner(model, example, gp.OneShot(), ratios=0.5)
        small = pruner.compact()
    except gp.GrowpruneError as error:
        return {"refused": str(error)}
    seconds, (before, after) = time.perf_counter() - start, (gp.measure(net, example) for net in (model, small))
    return {
        "layers": len(pruner.groups.layers),
        "skipped": len(pruner.skipped),
        "params": round(after.params / before.params, 3),
        "speedup": round(gp.speedup(before, after), 2),
        "seconds": round(seconds, 2),
    }


def tried(name: str, timeout: float) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--one", name]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done in {timeout:g} s"}
    if ran.returncode:
        return {"failed": ran.stderr[-300:]}
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="networks by name, as they are printed")
    parser.add_argument("--timeout", type=float, default=120)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("\n" + json.dumps(one(args.one)))
        return
    versions = {package: installed(package) for package in ("torch", *(package for package, _ in PACKAGES.values()))}
    rows = {}
    for name in args.only or [name for package, made in PACKAGES.values() if versions[package] for name in made()]:
        rows[name] = tried(name, args.timeout)
        print(name, json.dumps(rows[name]), flush=True)
    pruned = sum("layers" in row for row in rows.values())
    print(f"{pruned} of {len(rows)} pruned and proved")
    if args.out:
        result = {"benchmark": "beyond", "versions": versions, "networks": len(rows), "pruned": pruned, "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
