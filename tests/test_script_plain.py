"""What needs none of the modes of a script run, and what only looks so."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fake_cuda.scripts.plain import plain_function, plain_operation

REAL, aten = torch.arange(4), torch.ops.aten
with FakeTensorMode():
    FAKE = torch.empty(4)


@pytest.mark.parametrize(
    ("quick", "func", "args", "kwargs"),
    [
        (True, torch.add, (REAL, 1), {}),
        (True, torch.stack, ([REAL, REAL],), {"dim": 0}),
        (True, torch.from_numpy, (np.arange(3),), {}),
        (True, torch.Tensor.__getitem__, (REAL, (slice(2), ...)), {}),
        (True, torch.Tensor.shape.__get__, (REAL,), {}),
        (True, torch.zeros, (3,), {"dtype": torch.int64}),
        (False, torch.add, (REAL, FAKE), {}),
        (False, torch.stack, ([REAL, FAKE],), {}),
        (False, torch.add, (torch.nn.Parameter(torch.ones(2)), 1), {}),
        (False, torch.zeros, (3,), {"device": "cuda"}),
        (False, torch.empty, (10**6,), {}),
        (False, torch.Tensor.to, (REAL, 0), {}),
        (False, torch.Tensor.cuda, (REAL,), {}),
        (False, torch.Tensor.pin_memory, (REAL, "cuda"), {}),
        (False, torch.Tensor.grad.__get__, (REAL,), {}),
        (False, torch.Tensor.backward, (torch.ones(()),), {}),
        (False, torch._C._nn._parse_to, (0,), {}),
    ],
)
def test_functions_of_the_host_alone_are_told(quick, func, args, kwargs):
    assert plain_function(func, args, kwargs) is quick


@pytest.mark.parametrize(
    ("quick", "func", "args"),
    [
        (True, aten.add.Tensor, (REAL, REAL)),
        (True, aten.randint.default, (9, [3])),
        (False, aten.add.Tensor, (REAL, FAKE)),
        (False, aten.cat.default, ([REAL, FAKE],)),
        (False, aten.empty.memory_format, ([9999],)),
        (False, aten.empty_strided.default, ([9999], [1])),
    ],
)
def test_operations_of_the_host_alone_are_told(quick, func, args):
    assert plain_operation(func, args, {"device": torch.device("cpu")}) is quick
