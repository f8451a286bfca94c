"""Recognises paths that hold no checkpoint of nbdist, and names their reader."""

from __future__ import annotations

import contextlib
import json
import re
import zipfile
from pathlib import Path

_HEADER_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
# The first pickled number of a file that torch.save wrote before it wrote zip files.
_LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_MAX_NAMED = 5
# Folders of other programs: what names in one begin with, and what it is; the first that fits.
_FOLDERS = {
    (r"random_states_",):
        "it is a state saved by Accelerate. Load it on the ranks: accelerator.load_state(PATH).",
    (r"\.metadata$",):
        "it is a checkpoint of torch.distributed.checkpoint without nbdist's manifest. Load it on "
        "the ranks with torch.distributed.checkpoint.load().",
    (r".*\.distcp$",):
        "it has files of torch.distributed.checkpoint but no .metadata: a save that was not "
        "finished. Load another checkpoint.",
    (r"adapter_config\.json$",):
        "it is an adapter of PEFT. Load it on the ranks, before the model is prepared: "
        "PeftModel.from_pretrained(model, PATH).",
    (r"config\.json$", r"(pytorch_)?model.*\.(safetensors|bin)(\.index\.json)?$"):
        "it is a model folder of transformers. Load it on the ranks, before the model is prepared: "
        "AutoModel.from_pretrained(PATH).",
    (r"latest$", r"global_step"):
        "it is a checkpoint of DeepSpeed. Load it on the ranks with the engine's "
        "load_checkpoint(PATH).",
}  # fmt: skip


def instead(path: Path, manifest: str) -> str:
    """Sentences on the content of a path without a manifest, and on how to read it."""
    try:
        if path.is_dir():
            return _folder(path, manifest)
        if path.exists():
            return _file(path)
    except OSError as error:
        return f"it cannot be read ({error.strerror})."
    near = _checkpoints_in(path.parent, manifest)
    return "the path does not exist." + (f" Checkpoints next to it: {near}." if near else "")


def _folder(path: Path, manifest: str) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return "the folder is empty."
    for patterns, advice in _FOLDERS.items():
        if all(any(re.match(pattern, name) for name in names) for pattern in patterns):
            return advice
    inside = _checkpoints_in(path, manifest)
    if inside:
        return f"it is a folder of checkpoints. Name one of them: {inside}."
    few = ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
    return f"it has no {manifest}; it contains {few}."


def _checkpoints_in(path: Path, manifest: str) -> str:
    if not path.is_dir():
        return ""
    names = sorted(file.parent.name for file in path.glob(f"[!.]*/{manifest}"))
    return ", ".join(names[-_MAX_NAMED:]) + (
        f" ({len(names)} in all)" if len(names) > _MAX_NAMED else ""
    )


def _file(path: Path) -> str:
    with path.open("rb") as file:
        begin = file.read(_HEADER_BYTES + 1)
        begin_legacy = begin + file.read(len(_LEGACY_TORCH))
    size_bytes = path.stat().st_size
    if not size_bytes:
        return "it is an empty file."
    is_torch = begin_legacy.startswith(_LEGACY_TORCH)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            is_torch |= any(name.endswith("/data.pkl") for name in archive.namelist())
    if is_torch:
        return "it is a file of torch.save(). Load it on the ranks: torch.load(PATH)."
    header_bytes = int.from_bytes(begin[:_HEADER_BYTES], "little")
    if begin.endswith(b"{") and header_bytes <= min(_MAX_HEADER_BYTES, size_bytes):
        return (
            "it is a safetensors file, which has only weights. Load it on the ranks: "
            "model.load_state_dict(safetensors.torch.load_file(PATH)), before the model is "
            "prepared."
        )
    if path.name.endswith(".json"):
        with contextlib.suppress(ValueError):
            json.loads(path.read_text(encoding="utf-8"))
            return "it is a JSON file. Name the folder that it is in."
    return f"it is a file of {size_bytes:,} bytes, not a folder."
