"""What leaves a machine as a log tail holds no secret and loses nothing else."""

import pytest

from gpu_workers.common.redaction import redact


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("Using hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345 for the download", "hf_AbCd"),
        ("Authorization: Bearer abc.def-ghi_jkl123456", "abc.def-ghi"),
        ("GET http://store/x?X-Amz-Signature=0a1b2c3d&X-Amz-Expires=900", "0a1b2c3d"),
        ("postgres://worker:hunter22@db:5432/anneal", "hunter22"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "wJalrXUt"),
        ('{"hub_token": "opaque-value-1"}', "opaque-value-1"),
        ("key AKIAIOSFODNN7EXAMPLE was used", "AKIAIOSFODNN7EXAMPLE"),
        ("-----BEGIN PRIVATE KEY-----\nMIIEvQ\n", "MIIEvQ"),
        ("the value tr0ub4dor is known", "tr0ub4dor"),
    ],
)
def test_a_secret_is_removed(line, secret):
    cleaned = redact(line, known=["tr0ub4dor", None, ""])

    assert secret not in cleaned
    assert "[removed]" in cleaned


def test_an_ordinary_log_stays_as_it_is():
    log = (
        "Step 12/96: loss 0.1234, 512 tokens per second, 3 tokens: 17\n"
        '  File "/app/gpu_workers/train/loop/sft.py", line 40, in compute_loss\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.\n"
    )

    assert redact(log) == log
