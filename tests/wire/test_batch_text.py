"""Text that is not UTF-8 is a malformed batch, not a crash."""

from __future__ import annotations

import msgspec
import pytest

from paceline_wire.batch import Batch, BatchError, decode, pack_content


def test_invalid_utf8_is_malformed() -> None:
    batch = Batch(agent_id="node-0", boot_id="boot", sequence=0, packed_ns=1)
    content = msgspec.msgpack.encode(batch).replace(b"node-0", b"node\xe9-")
    with pytest.raises(BatchError) as caught:
        decode(pack_content(content))
    assert caught.value.reason == "malformed"
