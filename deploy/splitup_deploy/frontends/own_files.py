"""Which files are a model's own: what is read of them is published."""

from __future__ import annotations

from pathlib import Path

from splitup.core.errors import InvalidModel


def check_own(path: Path, folder: Path | None = None) -> Path:
    """Return a file of a model; raise InvalidModel for a hidden one, or one outside its folder.

    Whoever made the model could have its reader's keys published, by a link or by a name in it.
    Hugging Face's cache keeps files in "blobs" beside its "snapshots", which are links.
    """
    root, target = (folder or path.parent).resolve(), path.resolve()
    if target.is_relative_to(root):
        is_own = not any(part.startswith(".") for part in target.relative_to(root).parts)
    else:
        caches = [parent for parent in root.parents if parent.name.startswith("models--")]
        is_own = target.parent in [cache / "blobs" for cache in caches]
    if not is_own:
        raise InvalidModel(
            f"'{path}' leads to {str(target)!r:.120}, which is hidden or outside the model's "
            "folder, and the model's files are published; copy it there if it is of the model"
        )
    return path
