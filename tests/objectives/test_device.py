"""What an objective asks of a machine: memory that grows with the batch, and a device that nobody waits for."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from neuclip import CLIP, AmorLIP, FastCLIP, NeuCLIP, SigLIP
from neuclip.objectives import pairs
from tests.builders.processes import run
from tests.objectives.features import METHODS, B, D, batch, every_method, unit

# Memory.


class Live(TorchDispatchMode):
    """The most bytes that tensors made inside have held at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()).data_ptr() not in self.held:
                self.held.add(storage.data_ptr())
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.free, storage.data_ptr(), storage.nbytes())
        return made

    def free(self, place: int, size: int) -> None:
        self.held.discard(place)
        self.now -= size


def peak_of(objective, size: int) -> int:
    """Bytes of one call and its gradients, beyond the features and the state."""
    image, text = (unit(size, D, seed=k).float().requires_grad_() for k in (0, 1))
    scale, bias = torch.tensor(14.0, requires_grad=True), torch.tensor(-9.0, requires_grad=True)
    with Live() as live:
        objective(image, text, scale, bias, sample_ids=torch.arange(size)).backward()
    return live.peak


def test_similarities_of_both_sides_are_kept_up_to_so_many_numbers_and_computed_again_beyond(monkeypatch):
    both = 2 * 128 * 128
    monkeypatch.setattr(pairs, "STRIP", {"cpu": 4 * 2 * 128})
    monkeypatch.setattr(pairs, "KEPT", both)
    assert peak_of(CLIP(), 128) > 4 * both
    monkeypatch.setattr(pairs, "KEPT", both - 1)
    assert peak_of(CLIP(), 128) < 4 * both / 2


LARGE: dict[str, Callable[[], torch.nn.Module]] = {
    "clip": CLIP,
    "mini-batch form": lambda: CLIP(form="minibatch"),
    "siglip": SigLIP,
    "fastclip": lambda: FastCLIP(512),
    "fastclip, individual": lambda: FastCLIP(512, temperature="individual"),
    "amorlip": lambda: AmorLIP(D),
    "neuclip": lambda: NeuCLIP(D, num_prototypes=64, inner_steps=2),
    "neuclip, mlp": lambda: NeuCLIP(D, network="mlp", inner_steps=1),
}


@pytest.mark.parametrize("method", LARGE)
def test_memory_grows_with_the_batch_not_with_its_square(method, monkeypatch):
    monkeypatch.setattr(pairs, "STRIP", {"cpu": 2**13})
    monkeypatch.setattr(pairs, "KEPT", 0)
    small, large = peak_of(LARGE[method](), 128), peak_of(LARGE[method](), 512)
    assert large < 5 * small and large < 2 * 512 * 512  # half of one matrix of similarities


# A device that is not there: shapes, types and devices are followed without memory or arithmetic, and whatever makes
# the host wait for the device, or meets a tensor of the host, is an error. It is registered with torch for the rest of
# the process, so it runs in a child.

KEPT: list[Any] = []  # torch forgets a fallback with the library that registered it
MISTAKES: dict[str, Callable[[Tensor], Any]] = {
    "a number read": lambda x: x.sum().item(),
    "a condition": lambda x: 1 if x.any() else 0,
    "rows chosen by a condition": lambda x: x[x > 0],
    "a tensor of the host": lambda x: x + torch.zeros(B, D, device="cpu"),
    "a number copied": lambda x: x.new_tensor(1.0),
}


def register_device() -> str:
    backend_registration._setup_privateuseone_for_python_backend("gpu")
    torch.gpu.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    KEPT.append(torch.library.Library("_", "IMPL", "AutocastPrivateUse1"))
    KEPT[-1].fallback(torch.library.fallthrough_kernel)  # autocast is entered, and changes nothing
    return "gpu"


def error_of(action: Callable[..., Any], *arguments: Any) -> str:
    try:
        action(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def steps(objective: torch.nn.Module, device: str) -> None:
    """In train mode over the first steps, AmorLIP's over its first epoch, and once in eval mode."""
    objective.to(device)
    ids = torch.empty(B, dtype=torch.int64, device=device)
    for mode in [True] * (3 if isinstance(objective, AmorLIP) else 2) + [False]:
        image, text = (torch.empty(B, D, device=device).requires_grad_() for _ in range(2))
        scale, bias = (torch.empty((), device=device).requires_grad_() for _ in range(2))
        loss = objective.train(mode)(image, text, scale, bias, sample_ids=ids, caption_ids=ids)
        loss.backward()
        assert loss.device.type == image.grad.device.type == text.grad.device.type == device
    assert all(x.device.type == device for x in objective.state_dict().values() if isinstance(x, Tensor))


def follow() -> None:
    """Prints, as JSON, what each method raised on the device, and what each mistake did."""
    device = register_device()
    objectives = {name: build() for name, build in METHODS.items()}
    for objective in objectives.values():
        objective(**batch(0))  # the first call waits for the device: it looks at what it is given
    with FakeTensorMode(allow_non_fake_inputs=True) as pretended:
        for objective in objectives.values():
            objective._apply(pretended.from_tensor)
        methods = {name: error_of(steps, objective, device) for name, objective in objectives.items()}
        mistakes = {name: error_of(made, torch.empty(B, D, device=device)) for name, made in MISTAKES.items()}
    print(json.dumps({"methods": methods, "mistakes": mistakes}))


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, str]]:
    ended = run(follow)
    assert ended.code == 0, ended.errors
    return json.loads(ended.output.splitlines()[-1])


@every_method
def test_after_the_first_call_forward_and_backward_run_on_the_device_without_waiting_for_it(method, found):
    assert found["methods"][method] == ""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_pretended_device_notices_a_host_that_waits(mistake, found):
    assert found["mistakes"][mistake] != ""
