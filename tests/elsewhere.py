"""A second device for a machine that has none: tensors that are somewhere else.

A tensor there computes, with numbers that lie on the CPU inside of it; but like one on
a GPU it refuses to meet a tensor of another device, and to become a NumPy array. So a
forgotten `.to(device)` fails here as it fails on a GPU, and results can be compared.
Its name is "meta", the one device that every build of torch knows and nobody computes
on; while it is in use, torch's own meaning of that name is off.
"""

import contextlib
import os
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

THERE = torch.device("meta")
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}


class Elsewhere(torch.Tensor):
    """A tensor that says that it lies on the second device."""

    @staticmethod
    def __new__(cls, inner):
        about = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        about |= {"dtype": inner.dtype, "device": THERE}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **about)

    def __init__(self, inner):
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return compute(operation, args, kwargs or {})

    def __repr__(self, *, tensor_contents=None):
        return f"Elsewhere({self.inner})"

    def __getitem__(self, index):
        return super().__getitem__(there(index))

    def __setitem__(self, index, value):
        super().__setitem__(there(index), value)

    def __format__(self, spec):
        return format(self.inner, spec)

    def tolist(self):
        return self.inner.tolist()

    def new_tensor(self, data, **settings):
        return torch.tensor(data, **{"dtype": self.dtype, "device": THERE} | settings)

    def numpy(self, *_, **__):
        raise TypeError("can't convert a tensor that is elsewhere to numpy; use .cpu()")

    __array__ = numpy


def there(index):
    """An index with its lists as tensors, which torch would make of them itself."""
    if isinstance(index, list):
        return torch.tensor(index, device=THERE)
    return tuple(map(there, index)) if isinstance(index, tuple) else index


def tensors(values) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def compute(operation, args, kwargs):
    """Run an operation where its tensors are; refuse tensors of two devices."""
    found = tensors((args, kwargs))
    away = [isinstance(x, Elsewhere) for x in found]
    if any(x.is_meta and not isinstance(x, Elsewhere) for x in found):
        raise RuntimeError(f"{operation}: a tensor got by the second device unseen.")
    if operation in COPIES:
        result_away = isinstance(args[0], Elsewhere)
    else:
        meet = found
        if operation in INDEXED:  # torch takes indices from the CPU, not the reverse
            meet = tensors((args[0], args[2:]))
            if not isinstance(args[0], Elsewhere):
                meet = found
        kinds = {isinstance(x, Elsewhere) for x in meet if x.dim()}
        if len(kinds) > 1:
            shapes = [(tuple(x.shape), str(x.device)) for x in meet]
            raise RuntimeError(f"{operation}: tensors on two devices: {shapes}")
        result_away = any(away)
    if (device := kwargs.get("device")) is not None:
        result_away = torch.device(device).type == THERE.type
        kwargs = kwargs | {"device": "cpu" if result_away else device}
    args, kwargs = tree_map(
        lambda x: x.inner if isinstance(x, Elsewhere) else x, (args, kwargs)
    )
    inference = torch.is_inference_mode_enabled() and all(
        x.is_inference() for x in found
    )
    with torch.inference_mode(inference), torch.no_grad():
        out = operation(*args, **kwargs)
        if not result_away:
            return out
        return tree_map(
            lambda x: Elsewhere(x) if isinstance(x, torch.Tensor) else x, out
        )


class Everywhere(TorchDispatchMode):
    """Sees the operations that make tensors on the second device."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return compute(operation, args, kwargs or {})


def move(module: torch.nn.Module, device) -> torch.nn.Module:
    """nn.Module.to for this device: shared parameters stay shared."""
    moved = {}

    def there(x):
        if id(x) not in moved:
            y = x.detach().to(device)
            if isinstance(x, torch.nn.Parameter):
                y = torch.nn.Parameter(y, x.requires_grad)
            moved[id(x)] = (x, y)
        return moved[id(x)][1]

    for part in module.modules():
        for places in (part._parameters, part._buffers):
            places.update({n: there(x) for n, x in places.items() if x is not None})
    return module


@contextlib.contextmanager
def second_device():
    """Give this machine the device; and let nothing else call itself by its name.

    Where LITERATE_DEVICE names a real one, such as cuda, it is that one.
    """
    if real := os.environ.get("LITERATE_DEVICE"):
        yield real
        return
    plain_tensor, plain_autocast = torch.tensor, torch.autocast

    def tensor(data, *, device=None, **settings):
        made = plain_tensor(data, **settings)
        return made if device is None else made.to(device)

    def autocast(kind, *args, **settings):
        return plain_autocast("cpu" if kind == "meta" else kind, *args, **settings)

    def by_kind(function):
        return lambda *of: function(*("cpu" if kind == "meta" else kind for kind in of))

    fused = "torch.optim.adam._device_dtype_check_for_fused"  # it has a list of names
    with (
        mock.patch(fused, return_value=None),
        mock.patch("torch.is_autocast_enabled", by_kind(torch.is_autocast_enabled)),
        mock.patch("torch.get_autocast_dtype", by_kind(torch.get_autocast_dtype)),
        mock.patch("torch.tensor", tensor),
        mock.patch("torch.autocast", autocast),
        mock.patch("torch.nn.Module.to", move),
        mock.patch("torch.nn.Module.cpu", lambda module: move(module, "cpu")),
        Everywhere(),
    ):
        yield str(THERE)
