"""Published attention rates of the GPUs of presets, by architecture, in TFLOP/s."""

from __future__ import annotations

from sppo.hardware.published_attention import PublishedAttention

_TFLOPS = 1e12
_FROM_512 = (512, 1024, 2048, 4096, 8192, 16384)
_FROM_2K = (2048, 4096, 8192, 16384, 32768)

_FLASH_3_PAPER = (
    "FlashAttention-3 paper (arXiv:2407.08608), figures 5 and 6, H100 SXM5: forward causal, "
    "backward without a mask"
)
_FLASH_2_ON_A100 = (
    "FlashAttention-2 paper (arXiv:2307.08691), A100: at most 230 TFLOP/s forward and 63 % of the "
    "peak backward; by length and head size as the same kernels on an H100"
)


_Row = tuple[str, int, tuple[int, ...], tuple[float, ...], tuple[float, ...], str]
"""Back end, head size, lengths, rates of the forward and of the backward in TFLOP/s, and source."""


def _published(*rows: _Row) -> tuple[PublishedAttention, ...]:
    return tuple(
        PublishedAttention(
            backend,
            head_size,
            lengths,
            tuple(rate * _TFLOPS for rate in forward),
            tuple(rate * _TFLOPS for rate in backward),
            source,
        )
        for backend, head_size, lengths, forward, backward, source in rows
    )


AMPERE = _published(
    ("flash_attn_2", 64, _FROM_512,
     (112, 142, 163, 177, 183, 186), (121, 145, 161, 170, 175, 177), _FLASH_2_ON_A100),
    ("flash_attn_2", 128, _FROM_512,
     (119, 162, 185, 198, 207, 208), (130, 158, 177, 189, 194, 196), _FLASH_2_ON_A100),
)  # fmt: skip
HOPPER = _published(
    ("cudnn", 64, _FROM_512,
     (225, 288, 334, 363, 379, 388), (266, 348, 395, 417, 432, 433), _FLASH_3_PAPER),
    ("cudnn", 128, _FROM_2K,
     (484, 591, 644, 673, 688), (370, 474, 541, 579, 581), "cuDNN 9.19 on H200, causal, bf16"),
    ("flash_attn_2", 64, _FROM_512,
     (180, 229, 262, 284, 295, 299), (198, 238, 264, 279, 287, 291), _FLASH_3_PAPER),
    ("flash_attn_2", 128, _FROM_512,
     (191, 260, 298, 319, 333, 335), (214, 260, 291, 310, 318, 322), _FLASH_3_PAPER),
    ("flash_attn_3", 64, _FROM_512,
     (197, 265, 371, 420, 460, 473), (272, 363, 422, 453, 472, 474), _FLASH_3_PAPER),
    ("flash_attn_3", 128, _FROM_512,
     (292, 423, 521, 579, 602, 616), (316, 424, 501, 542, 559, 561), _FLASH_3_PAPER),
)  # fmt: skip
BLACKWELL = _published(
    ("flash_attn_4", 128, (8192,), (1418,), (1209,),
     "flash-attention pull request 2280, B200, causal, 8Ki tokens"),
)  # fmt: skip
