"""Every method on a device that is not there: shapes, types and devices are followed without memory or arithmetic, and
whatever makes the host wait for the device, or meets a tensor of the host, is an error.

It registers a device with torch for the rest of the process, so it runs in a child (`tests.builders.processes.run`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration

from neuclip import AmorLIP
from tests.objectives.features import METHODS, B, D

KEPT: list[Any] = []  # torch forgets a fallback with the library that registered it
MISTAKES: dict[str, Callable[[torch.Tensor], Any]] = {
    "a number read": lambda x: x.sum().item(),
    "a condition": lambda x: 1 if x.any() else 0,
    "rows chosen by a condition": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "a tensor of the host": lambda x: x + torch.zeros(B, D, device="cpu"),
    "a number copied": lambda x: x.new_tensor(1.0),
}


@contextmanager
def pretended_device() -> Iterator[str]:
    backend_registration._setup_privateuseone_for_python_backend("gpu")
    torch.gpu.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    KEPT.append(torch.library.Library("_", "IMPL", "AutocastPrivateUse1"))
    KEPT[-1].fallback(torch.library.fallthrough_kernel)  # autocast is entered, and changes nothing
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield "gpu"


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def follow() -> None:
    """Prints, as JSON, what each method raised on the device, and what each mistake did."""
    with pretended_device() as device:
        found = {name: error_of(lambda build=build: steps(build(), device)) for name, build in METHODS.items()}
        given = torch.empty(B, D, device=device)
        mistakes = {name: error_of(lambda m=mistake: m(given)) for name, mistake in MISTAKES.items()}
    print(json.dumps({"methods": found, "mistakes": mistakes}))


def steps(objective: torch.nn.Module, device: str) -> None:
    """In train mode over the first steps, AmorLIP's over its first epoch, and once in eval mode."""
    objective.to(device)._checked = True  # the first call waits for the device: it looks at what it is given
    ids = torch.empty(B, dtype=torch.int64, device=device)
    for mode in [True] * (4 if isinstance(objective, AmorLIP) else 2) + [False]:
        image, text = (torch.empty(B, D, device=device).requires_grad_() for _ in range(2))
        scale, bias = (torch.empty((), device=device).requires_grad_() for _ in range(2))
        loss = objective.train(mode)(image, text, scale, bias, sample_ids=ids, caption_ids=ids)
        loss.backward()
        assert loss.device.type == image.grad.device.type == text.grad.device.type == device
    state = [x for x in objective.state_dict().values() if isinstance(x, torch.Tensor)]
    assert all(x.device.type == device for x in state)
