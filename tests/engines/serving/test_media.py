"""An image that is small to send and huge to hold is refused before it is decoded."""

import io
from pathlib import Path

import pytest
from PIL import Image

from gpu_workers.common.config import EngineConfig
from gpu_workers.engine.command import build_environment


@pytest.mark.slow
@pytest.mark.parametrize(("side", "is_taken"), [(4096, True), (4097, False)])
def test_an_image_of_too_many_pixels_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: int, is_taken: bool
) -> None:
    from vllm.multimodal.media.image import ImageMediaIO

    limit = "VLLM_MAX_IMAGE_PIXELS"
    monkeypatch.setenv(limit, build_environment(EngineConfig(work_dir=tmp_path, kv_cache_bytes=0))[limit])
    sent = io.BytesIO()
    Image.new("1", (side, side)).save(sent, "PNG")
    assert len(sent.getvalue()) < 10_000

    if is_taken:
        assert ImageMediaIO().load_bytes(sent.getvalue()).media.size == (side, side)
    else:
        with pytest.raises(ValueError, match="exceed the maximum of 16777216 pixels"):
            ImageMediaIO().load_bytes(sent.getvalue())
