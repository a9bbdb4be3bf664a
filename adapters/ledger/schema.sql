-- The embedded ledger, version 1. The columns of stored_events are those of eventsourcing's recorders, with the place of
-- an event in the whole and the hash of its leaf beside them:
--   originator_id       the stream
--   originator_version  dense in it from 1
--   topic               the type of the event
--   state               the leaf: canonical JSON, stored as it is hashed and exported

CREATE TABLE stored_events (
    seq INTEGER PRIMARY KEY,
    originator_id TEXT NOT NULL,
    originator_version INTEGER NOT NULL,
    topic TEXT NOT NULL,
    state BLOB NOT NULL,
    leaf_hash BLOB NOT NULL,
    UNIQUE (originator_id, originator_version)
) STRICT;

CREATE INDEX stored_events_topic ON stored_events (topic);

-- Its one row is the first thing a transaction writes: whoever has written it holds the ledger until it commits.
CREATE TABLE head (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    seq INTEGER NOT NULL,
    at INTEGER NOT NULL
) STRICT;

INSERT INTO head VALUES (1, 0, 0);

-- A cache of folded states.
CREATE TABLE snapshots (
    seq INTEGER PRIMARY KEY,
    schema TEXT NOT NULL,
    leaf_hash BLOB NOT NULL,
    body BLOB NOT NULL,
    body_sha256 BLOB NOT NULL
) STRICT;

-- Against accidents, whatever connection they come by; the tree of hashes is against people (ledger.md). REPLACE deletes
-- without asking a delete trigger unless recursive_triggers is on, but it cannot avoid the ones before an insert, and
-- these leave it nothing to replace.

CREATE TRIGGER stored_events_seq_is_dense BEFORE INSERT ON stored_events
WHEN NEW.seq IS NOT (SELECT coalesce(max(seq), 0) + 1 FROM stored_events)
BEGIN
    SELECT RAISE(ABORT, 'an event is appended after the newest one and nowhere else');
END;

CREATE TRIGGER stored_events_version_is_dense BEFORE INSERT ON stored_events
WHEN NEW.originator_version IS NOT (
    SELECT coalesce(max(originator_version), 0) + 1 FROM stored_events WHERE originator_id = NEW.originator_id
)
BEGIN
    SELECT RAISE(ABORT, 'an event follows the newest one of its stream');
END;

CREATE TRIGGER stored_events_no_update BEFORE UPDATE ON stored_events
BEGIN
    SELECT RAISE(ABORT, 'events are never changed');
END;

CREATE TRIGGER stored_events_no_delete BEFORE DELETE ON stored_events
BEGIN
    SELECT RAISE(ABORT, 'events are never deleted');
END;

CREATE TRIGGER head_never_goes_back BEFORE UPDATE ON head
WHEN NEW.one IS NOT 1 OR NEW.seq < OLD.seq OR NEW.at < OLD.at
BEGIN
    SELECT RAISE(ABORT, 'the head of a ledger never goes back');
END;

CREATE TRIGGER head_no_insert BEFORE INSERT ON head
BEGIN
    SELECT RAISE(ABORT, 'a ledger has one head');
END;

CREATE TRIGGER head_no_delete BEFORE DELETE ON head
BEGIN
    SELECT RAISE(ABORT, 'a ledger has one head');
END;
