"""The keys of the configuration that are about measuring: `profile` of the file, `sleep` of a deployment."""

from __future__ import annotations

import pytest

from gpuledger.domain.document_problems import DocumentError
from gpuledger.domain.documents import Json
from tests.unit.shells import config_for, document, embedding

SLEEP: Json = {"asleep_bytes": "24MiB", "sleep_ms": 100, "wake_ms": 200}
SLEEPER: Json = {"type": "reference", "task": "embedding", "sleep": {}}


@pytest.mark.parametrize("word", ["at_start", "when_idle", "never"])
def test_when_is_measured(word: str) -> None:
    assert config_for(document(profile=word)).document.profile == word


def test_what_a_deployment_keeps_asleep() -> None:
    (entry,) = config_for(document(embedding(runtime=SLEEPER, sleep=SLEEP))).document.deployments
    assert entry.sleep is not None
    assert (entry.sleep.asleep_bytes, entry.sleep.sleep_ms, entry.sleep.wake_ms) == (24 * 2**20, 100, 200)


def test_a_sleep_of_what_cannot_sleep_is_refused() -> None:
    with pytest.raises(DocumentError) as raised:
        config_for(document(embedding(sleep=SLEEP)))
    assert str(raised.value) == (
        "config.deployments[0].sleep: a runtime of type reference, as it is configured here, cannot sleep"
    )
