"""Writes a checkpoint as a GGUF file for llama.cpp; runs in the environment that has `gguf`.

    python -m benchmarks.llama_cpp.convert MODEL FILE [--float32]

Every number is kept as it is stored: BF16 matrices, MXFP4 experts, float32 vectors (and a float32 router, as in
llama.cpp's own conversion). With --float32 the same numbers are all written as float32, for comparing results.
"""

import argparse
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType

from stepkernel.model.checkpoint import Checkpoint
from stepkernel.model.shard import Shard

from .metadata import ARCHITECTURES, ConversionError, Value, metadata
from .tensors import tensors, to_float32

_KINDS = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}


def convert(model: Path, target: Path, as_float32: bool = False) -> None:
    """Writes `target`. Raises ConversionError for a model that llama.cpp does not compute."""
    checkpoint = Checkpoint.open(model)
    config = checkpoint.config
    keys = metadata(config)
    writer = GGUFWriter(target, ARCHITECTURES[config.family])
    writer.add_name(model.resolve().name)
    writer.add_string("tokenizer.ggml.model", "none")
    mxfp4 = config.expert_format == "mxfp4"
    stored = LlamaFileType.MOSTLY_MXFP4_MOE if mxfp4 else LlamaFileType.MOSTLY_BF16
    writer.add_file_type(LlamaFileType.ALL_F32 if as_float32 else stored)
    for key, value in keys.items():
        _add(writer, key, value)
    for name, values, storage in tensors(config, checkpoint.weights(Shard(0, 1))):
        if as_float32 or storage == "float32":
            writer.add_tensor(name, np.ascontiguousarray(to_float32(values, storage)))
        else:
            kind = GGMLQuantizationType.MXFP4 if storage == "mxfp4" else GGMLQuantizationType.BF16
            writer.add_tensor(name, np.ascontiguousarray(values).view(np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_key_value(key, value, _KINDS[type(value)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llama_cpp.convert", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--float32", action="store_true", help="write all numbers as float32")
    arguments = parser.parse_args()
    partial = arguments.file.with_suffix(".partial")
    try:
        convert(arguments.model, partial, arguments.float32)
        partial.rename(arguments.file)
    except ConversionError as error:
        raise SystemExit(str(error)) from None
    finally:
        partial.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
