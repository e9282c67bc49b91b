"""The files in which a network leaves growprune.

    network ─► traced ─┬─► .onnx    ONNX, for ONNX Runtime and whatever else reads it
                       └─► .pt2     torch.export's, for torch.export.load and AOTInductor

A file is made in memory and read again from there, so that it can be run before any of it is on the disk. Each holds
all its weights, and `facts`: one line of JSON on what whoever uses it must know.
"""

from __future__ import annotations

import importlib
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from growprune.errors import GrowpruneError
from growprune.running import leaves

KEY, EXTRA = "growprune", "growprune.json"
"""What the facts are called: in an .onnx file's metadata, among the extra files of a .pt2 one."""
INPUT, OUTPUT, BATCH = "input", "output", "batch"
Runs = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Format:
    name: str
    write: Callable[[ExportedProgram, str], tuple[bytes, dict[str, Any]]]  # the file, and what there is to tell of it
    read: Callable[[bytes], Runs | None]
    needs: tuple[str, ...] = ()
    runner: str = "torch"
    limit: int | None = None


def traced(model: nn.Module, example: Tensor, free: bool) -> ExportedProgram:
    """The network's computation on such inputs; `free`: on any number of them.

    Where the quick tracer takes the number for a constant (`len(x)`), the one that reads Python's bytecode may not.
    """
    shapes = ShapesCollection()
    shapes[example] = {0: Dim(BATCH)} if free else {}
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # one operator for a whole layer, which no file knows
        with torch.no_grad():
            try:
                program = torch.export.export(model, (example,), dynamic_shapes=shapes, strict=False)
            except Exception as error:
                try:
                    program = torch.export.export(model, (example,), dynamic_shapes=shapes, strict=True)
                except Exception:
                    raise error from None
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # names files of this machine
    return program


# -- ONNX ------------------------------------------------------------------------------------------------------------


def to_onnx(program: ExportedProgram, facts: str) -> tuple[bytes, dict[str, Any]]:
    count = sum(each is not None for each in program.graph_signature.user_outputs)
    names = [OUTPUT] if count == 1 else [f"{OUTPUT}{number}" for number in range(count)]
    made = torch.onnx.export(program, input_names=[INPUT], output_names=names, dynamo=True, verbose=False)
    assert made is not None
    model: Any = made.model_proto
    tidy(model.graph)
    model.metadata_props.add(key=KEY, value=facts)
    opset = next(each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))
    return model.SerializeToString(), {"opset": opset}


def tidy(graph: Any) -> None:
    """Call the free size `batch`, and take out what the exporter noted for its own developers: it names files of
    this machine."""
    graph.ClearField("metadata_props")
    for node in graph.node:
        node.ClearField("metadata_props")
    free = graph.input[0].type.tensor_type.shape.dim[0].dim_param  # empty if it is a number
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.ClearField("metadata_props")
        for dim in value.type.tensor_type.shape.dim:
            if free and dim.dim_param:
                dim.dim_param = re.sub(rf"\b{free}\b", BATCH, dim.dim_param)


def from_onnx(blob: bytes) -> Runs | None:
    """The file, checked, as ONNX Runtime runs it (on one thread), if that is installed."""
    onnx = importlib.import_module("onnx")
    onnx.checker.check_model(blob, full_check=True)
    if find_spec("onnxruntime") is None:
        return None
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = runtime.InferenceSession(blob, options, providers=["CPUExecutionProvider"])
    return lambda x: [torch.from_numpy(found) for found in session.run(None, {INPUT: x.numpy()})]


# -- torch.export ----------------------------------------------------------------------------------------------------


def to_pt2(program: ExportedProgram, facts: str) -> tuple[bytes, dict[str, Any]]:
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={EXTRA: facts})
    return file.getvalue(), {}


def from_pt2(blob: bytes) -> Runs:
    module = torch.export.load(io.BytesIO(blob)).module()
    return lambda x: list(leaves(module(x)))


FORMATS: dict[str, Format] = {
    ".onnx": Format("ONNX", to_onnx, from_onnx, ("onnx", "onnxscript"), "onnxruntime", 2**31 - 1),
    ".pt2": Format("torch.export", to_pt2, from_pt2),
}
"""By suffix. An .onnx file is one protobuf message, of which none may be larger."""


def needed(suffix: str) -> None:
    """Refuse a format whose packages are missing."""
    lacking = [name for name in FORMATS[suffix].needs if find_spec(name) is None]
    if lacking:
        some = f"the package {lacking[0]}, which is" if len(lacking) == 1 else f"{' and '.join(lacking)}, which are"
        raise GrowpruneError(
            f"--out: a {suffix} file needs {some} not installed; run: pip install {' '.join(lacking)} onnxruntime "
            "(a .pt2 file needs neither)"
        )


@contextmanager
def silently() -> Iterator[None]:
    """Tracers and exporters print, warn and log, about their own doings; so may the network's own code."""
    before = logging.root.manager.disable
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)
