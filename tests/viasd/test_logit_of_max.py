import numpy as np
import pytest
import torch

from viasd.errors import OptionError
from viasd.estimator import logit_of_max


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logit_of_max_is_exact_next_to_one(dtype):
    top = np.log((1 - 1e-12) / 1e-12)
    reference = torch.tensor([[top, np.log(0.25), np.log(0.75)]], dtype=torch.float64)
    f = logit_of_max(reference.to(dtype))
    assert f.dtype == dtype
    assert f.item() == pytest.approx(top, rel=1e-12 if dtype == torch.float64 else 1e-6)


def test_logit_of_max_of_one_hot_flat_and_tied_rows():
    inf = float("inf")
    rows = torch.tensor([[0.0, -inf, -inf], [0.0, -300.0, -300.0], [1.0, 1.0, -inf], [2.0, 2.0, 2.0]])
    assert logit_of_max(rows).tolist() == pytest.approx([40.0, 40.0, 0.0, -np.log(2)])


def test_logit_of_max_follows_the_temperature_and_leaves_its_input_alone():
    logits = torch.randn(2, 3, 50, dtype=torch.float64)
    before = logits.clone()
    for temperature, scale in ((0.5, 2.0), (1.0, 1.0), (0.0, 1.0)):
        q = torch.softmax(logits * scale, -1).amax(-1)
        assert torch.allclose(logit_of_max(logits, temperature), torch.logit(q))
    assert torch.equal(logits, before)
    assert logit_of_max(logits.bfloat16()).dtype == torch.float32
    with pytest.raises(OptionError):
        logit_of_max(logits, -1.0)
