"""Choice of an attention back end: the table, the rule, and the trial on a case."""

import logging
from dataclasses import replace

import pytest
import torch

from sppo.kernels.attention import choice as attention_choice
from sppo.kernels.attention import interface
from sppo.kernels.attention.block_attention import BlockAttention
from sppo.kernels.attention.call import AttentionCall
from sppo.kernels.attention.choice import CAPABILITIES, KERNELS, AttentionCase, chosen_name, why_not
from sppo.kernels.attention.torch_blocks import TorchBlocks
from tests.kernels.attention.reference import Definition
from tests.tiers import each_once

GPU = torch.device("cuda", 0)


def case(device=GPU, *, dtype=torch.bfloat16, head_size=128, group=4, **options):
    return AttentionCase(
        torch.device(device), dtype, head_size, group, **{"window": False, **options}
    )


@pytest.fixture(autouse=True)
def _forget():
    chosen_name.cache_clear()
    yield
    chosen_name.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    """A device of compute capability 9.0 with everything installed, where everything works."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention_choice, "is_installed", lambda module: True)
    broken = {}
    monkeypatch.setattr(
        attention_choice, "error_on_a_small_case", lambda name, case: broken.get(name)
    )
    return broken


def test_a_cpu_gets_the_flash_kernel(caplog):
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            assert chosen_name(case("cpu")) == "cpu_flash"
    assert [record.message.split(" (torch")[0] for record in caplog.records] == [
        "attention back end on cpu (bfloat16, head size 128): cpu_flash"
    ]


def test_a_gpu_takes_the_first_that_works(gpu, caplog):
    assert chosen_name(case()) == "flash_attn_3"
    chosen_name.cache_clear()
    gpu.update(flash_attn_3="is wrong", flash_attn_4="fails", flash_attn_2="fails", cudnn="fails")
    with caplog.at_level(logging.INFO):
        assert chosen_name(case()) == "torch_flash"
    assert "; flash_attn_3 is wrong; flash_attn_4 fails; cudnn fails" in caplog.text


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(
    ("capability", "options"),
    [
        ((9, 0), {"dtype": torch.float32}),
        ((10, 0), {"dtype": torch.float64, "window": True, "single_tokens": True}),
        ((8, 0), {"head_size": 36}),
        ((9, 0), {"head_size": 264, "window": True}),
        ((7, 5), {"dtype": torch.float16, "single_tokens": True}),
    ],
)
def test_plain_operations_compute_what_no_fast_kernel_takes(
    gpu, monkeypatch, capability, options, installed
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(attention_choice, "is_installed", lambda module: installed)
    assert chosen_name(case(**options)) == "torch_blocks"


@pytest.mark.parametrize(
    ("capability", "options", "chosen"),
    [
        ((9, 0), {}, "cudnn"),
        ((9, 0), {"window": True}, "torch_flash"),
        ((9, 0), {"single_tokens": True}, "torch_flash"),
        ((8, 0), {}, "torch_flash"),
    ],
)
def test_without_packages_cudnn_is_taken_on_hopper_alone(
    gpu, monkeypatch, capability, options, chosen
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(attention_choice, "is_installed", lambda module: False)
    assert chosen_name(case(**options)) == chosen
    assert why_not("flash_attn_2", case(**options)) == (
        "needs flash_attn_2_cuda, which is not installed"
    )


def test_a_gpu_without_a_back_end_is_refused(gpu):
    gpu.update(dict.fromkeys(CAPABILITIES, "fails"))
    with pytest.raises(ValueError, match="no attention back end for cuda.*torch_blocks fails"):
        chosen_name(case())
    gpu.pop("torch_blocks")
    assert chosen_name(case()) == "torch_blocks"


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("cpu_flash", {}, "runs on cpu, tensors are on cuda"),
        ("torch_flash", {"device": "cpu"}, "runs on cuda, tensors are on cpu"),
        ("flash_attn_2", {"dtype": torch.float32}, "does not take float32"),
        ("flash_attn_4", {"head_size": 256}, "takes heads of up to 128, not 256"),
        ("torch_flash", {"head_size": 36}, "takes head sizes divisible by 8, not 36"),
        ("cudnn", {"window": True}, "has no sliding window"),
        ("cudnn", {"single_tokens": True}, "takes no blocks of one token"),
    ],
)
def test_the_table_says_why_not(gpu, name, options, reason):
    assert reason in why_not(name, case(**options))


@pytest.mark.parametrize(
    ("queries", "keys", "documents", "single"),
    [
        (64, 8256, (0,), False),
        (64, 8257, (0,), True),  # a prefix is read in parts of 8192 keys
        (64, 64, (0,), False),
        (1, 64, (0,), True),
        (64, 8256, (0, 100), False),  # the first document ended before the span
        (64, 8357, (0, 100), True),
        (64, 8257, (0, 1), False),
        (64, 8256, (0, 100, 8240), True),
    ],
)
def test_blocks_of_one_token_are_told(queries, keys, documents, single):
    assert interface.may_have_single_tokens(queries, keys, documents) == single


@pytest.mark.parametrize(
    ("documents", "chosen"),
    [((0, 1000, 4000), "cudnn"), ((0, 1000, 5000), "cudnn"), ((0, 1000, 6000), "torch_flash")],
)
def test_cudnn_computes_spans_inside_one_document(gpu, monkeypatch, documents, chosen):
    """Documents that ended before the span do not matter."""
    monkeypatch.setattr(attention_choice, "is_installed", lambda module: False)
    q = torch.empty(3000, 4, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(8000, 1, 64, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(torch.Tensor, "device", property(lambda _: GPU), raising=False)
    call = AttentionCall(q, k, k, document_starts=documents)
    assert interface.kernel_of(call) is KERNELS[chosen]


class ForgetsAKey(TorchBlocks):
    """A package with an off-by-one."""

    def backward(self, *operands):
        dq, dk, dv = super().backward(*operands)
        dk[:, :, -1] = 0
        return dq, dk, dv


class ForgetsTheThirdTile(TorchBlocks):
    """A loop over tiles of 128 keys that ends too early."""

    def forward(self, call):
        if call.k.shape[2] > 256 and not call.causal and call.mask is None:
            call = replace(call, k=call.k[:, :, :256], v=call.v[:, :, :256])
        return super().forward(call)


class Raises(TorchBlocks):
    """A package that changed its interface."""

    def forward(self, call):
        raise TypeError("forward() got an unexpected keyword\nand more")


@pytest.mark.parametrize(
    ("dtype", "window"),
    each_once([torch.bfloat16, torch.float32, torch.float64], [False, True]),
)
def test_the_small_case_finds_what_is_wrong(monkeypatch, dtype, window):
    small = case("cpu", dtype=dtype, head_size=16, group=2, window=window)

    def found(kernel):
        monkeypatch.setitem(attention_choice.KERNELS, "cpu_flash", kernel)
        return attention_choice.error_on_a_small_case("cpu_flash", small)

    assert found(Definition()) is None
    assert "is wrong on a small case: relative error" in found(BlockAttention(ForgetsAKey()))
    if not window:
        third = found(BlockAttention(ForgetsTheThirdTile()))
        assert "is wrong on a small case: relative error" in third
    assert found(BlockAttention(Raises())) == (
        "fails on a small case with TypeError: forward() got an unexpected keyword"
    )


def test_the_small_case_leaves_the_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    attention_choice.error_on_a_small_case("torch_blocks", case("cpu", head_size=16))
    assert torch.equal(torch.rand(2), expected)


def test_a_package_that_fails_to_import_is_not_installed(tmp_path, monkeypatch):
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package/__init__.py").write_text("raise OSError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    assert not attention_choice.is_installed("broken_package.part")
    assert not attention_choice.is_installed("json.no_such_part")
    assert attention_choice.is_installed("json.decoder")
