"""Ledgers: events as canonical leaves (`codec`), kept in memory or in a SQLite file, exported and read again.

Every adapter answers to one contract, tests/contract/test_ledger.py. Tools open what they are given with
`export.open_target`; a scheduler opens `sqlite.SqliteLedger` under a `lock.LedgerLock`.
"""
