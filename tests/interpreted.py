"""Triton's kernels on a CPU: its interpreter (TRITON_INTERPRET=1), and what that lacks for Liger's.

Three mends of Triton 3.9, made by importing this module before Liger: an argument that is a float
has the methods of a value, functions of libdevice exist, and tensors of bf16, which NumPy does not
know, are computed in float32 and rounded at the end of a launch. So what a kernel rounds on its way
is not tested.
"""

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter

libdevice.rsqrt = lambda x: 1 / tl.sqrt(x)
libdevice.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1


def _as_value(arg, usual=interpreter._implicit_cvt):
    if isinstance(arg, float):
        handle = interpreter.TensorHandle(np.array([arg], np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)
    return usual(arg)


def _in_float32(kernel, *args, usual=interpreter.InterpretedFunction.run, **options):
    given = dict(enumerate(args)) | options
    wide = {
        key: value.float()
        for key, value in given.items()
        if torch.is_tensor(value) and value.dtype == torch.bfloat16
    }
    assert all(wide[key].stride() == given[key].stride() for key in wide)  # kernels are told them
    args = [wide.get(place, value) for place, value in enumerate(args)]
    usual(kernel, *args, **options | {key: wide[key] for key in wide.keys() & options.keys()})
    for key, value in wide.items():
        given[key].data.copy_(value)


interpreter._implicit_cvt = _as_value
interpreter.InterpretedFunction.run = _in_float32
