"""The one place that touches open_clip."""

from __future__ import annotations

from types import ModuleType

from neuclip.models.torchvision_guard import guard_torchvision

# A data worker that starts afresh is sent our transforms and open_clip's within them: it imports this first.
guard_torchvision()


def open_clip_module() -> ModuleType:
    """open_clip, imported behind the guard: `open_clip_module().ClipLoss()`."""
    import open_clip

    return open_clip
