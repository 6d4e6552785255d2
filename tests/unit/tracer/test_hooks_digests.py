"""Changes of a tensor's bytes are noticed however they were made."""

from __future__ import annotations

import pytest
import torch

from tensortrace.tracer.hooks import digests
from tensortrace.tracer.hooks.digests import Digests


@pytest.fixture(params=["cpu", "device"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "device":
        monkeypatch.setattr(digests, "_digest_of_bytes", digests._digest_on_device)


def test_a_write_through_data_is_noticed_although_the_version_stays() -> None:
    known, tensor = Digests(), torch.nn.Parameter(torch.arange(185.0).reshape(37, 5) / 185)
    known.note(tensor)
    assert not known.changed(tensor)
    version = tensor._version
    tensor.data[3, 2] += 1e-7
    assert tensor._version == version
    assert known.changed(tensor)
    assert not known.changed(tensor)


def test_swapped_elements_a_sign_of_zero_and_another_tensor_are_noticed() -> None:
    known, tensor = Digests(), torch.arange(300.0)
    known.note(tensor)
    tensor[[3, 7]] = tensor[[7, 3]]
    assert known.changed(tensor)
    tensor[0] = -0.0
    assert known.changed(tensor)
    assert known.changed(tensor.clone())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64])
def test_every_dtype_and_layout_has_a_digest(dtype: torch.dtype) -> None:
    known = Digests()
    for tensor in (torch.ones(0), torch.ones(()), torch.ones(70, 3).t(), torch.ones(1).expand(9)):
        known.note(tensor.to(dtype))
    sparse = torch.eye(3).to_sparse()
    known.note(sparse)
    assert not known.changed(sparse)
