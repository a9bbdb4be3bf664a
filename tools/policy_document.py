"""Policies as people revise them: some keys of one, the policy that they lead to, and what is different then."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from gpuledger.domain.document_problems import DocumentError, at
from gpuledger.domain.documents import Json, policy_document, policy_of
from gpuledger.domain.policy import Policy

WHERE: Final = "policy"


def revised(present: Policy, keys: Mapping[str, Json]) -> Policy:
    """The present policy with other keys. Raises DocumentError with everything that is wrong.

    One that nobody named is called as it would be called from a configuration: by the hash of what differs from the
    defaults. Whether LAB is paused now is no part of that name.
    """
    merged = {**policy_document(present), **keys}
    unnamed = "revision" not in keys
    if unnamed:
        merged["revision"] = _name_of(merged, keys)
    wanted = policy_of(merged, WHERE)
    same = replace(wanted, revision=present.revision) == present
    if same and unnamed:
        return present
    if not same and not unnamed and wanted.revision == present.revision:
        told = f"{present.revision} is the present policy, and other keys differ from it"
        raise DocumentError.of(at(WHERE, "revision"), f"{told}: leave it out, or name another")
    if not unnamed and wanted.revision == Policy().revision and wanted != Policy():
        told = f"{wanted.revision} is the policy of this release, and other keys differ from it"
        raise DocumentError.of(at(WHERE, "revision"), f"{told}: leave it out, or name another")
    return wanted


def _name_of(merged: Mapping[str, Json], keys: Mapping[str, Json]) -> str:
    base = policy_document(Policy())
    kept = {"revision"} if "lab_paused" in keys else {"revision", "lab_paused"}
    changed = {key: value for key, value in merged.items() if key not in kept and base.get(key) != value}
    if not changed:
        return str(base["revision"])
    digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()
    return f"{base['revision']}+{digest[:8]}"


def changes_of(before: Policy, after: Policy) -> list[dict[str, Any]]:
    """`[{"key", "from", "to"}, ...]`, in the order in which a policy has its keys."""
    old, new = policy_document(before), policy_document(after)
    return [{"key": key, "from": old[key], "to": value} for key, value in new.items() if old[key] != value]
