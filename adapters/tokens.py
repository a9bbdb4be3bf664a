"""Tokens of clients and operators: a file of hashes that the command line changes and a running server looks at.

    {"schema": "gpuledger.tokens/1", "tokens": [{"id": "tok-5f3a1c9e", "kind": "client", "subject": "app",
     "scope": null, "sha256": "...", "created_at": "...", "expires_at": null}]}

A token is 256 random bits and is shown once. Its plain SHA-256 is kept: slow and salted hashes are there for passwords,
which can be tried in the order in which people choose them, and nobody tries 2^256 tokens.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Literal

import orjson
import structlog
from pydantic import Field, TypeAdapter, ValidationError

from gpuledger.domain.document_problems import DocumentError, Problem, at, problems_of
from gpuledger.domain.state import DOCUMENT
from gpuledger.domain.units import Identifier, Instant, Sha256Hex, format_instant, seconds

SCHEMA: Final = "gpuledger.tokens/1"
FILE_NAME: Final = "tokens.json"
#: Each is compared with at each request: so many take a fraction of a millisecond.
MAX_TOKENS: Final = 1000
#: Several times what so many tokens take.
MAX_FILE_BYTES: Final = 1024 * 1024
#: What has expired is still listed for a while, so that who asks why a token does not work finds it.
EXPIRED_KEPT_SECONDS: Final = 30 * 86_400
#: Changes take milliseconds; who holds the file longer is stuck.
LOCK_PATIENCE_SECONDS: Final = 10.0
#: How soon a file that could not be read is tried again though nobody changed it.
RETRY_SECONDS: Final = 1.0
_LOCK_PAUSE_SECONDS: Final = 0.02
_SECRET_BYTES: Final = 32

_log = structlog.get_logger(__name__)


class TokenKind(StrEnum):
    CLIENT = "client"
    OPERATOR = "operator"


class Scope(StrEnum):
    """What an operator's token is for. Each may also read."""

    #: See status, queue and plans, and try a plan or a policy.
    READ = "read"
    #: Take the ledger away.
    AUDIT = "audit"
    #: Change how the server runs.
    OPERATE = "operate"

    def allows(self, needed: Scope) -> bool:
        return needed in (Scope.READ, self)


#: Marks where a token belongs, for people and for programs that look for secrets in places where none should be.
PREFIXES: Final = {TokenKind.CLIENT: "glc_", TokenKind.OPERATOR: "glo_"}


@dataclass(frozen=True, slots=True)
class Token:
    """What is known of a token. `subject`: a client of the configuration, or the name that an operator acts under."""

    __pydantic_config__ = DOCUMENT

    id: Annotated[str, Field(pattern=r"^tok-[0-9a-f]{8}$")]
    kind: TokenKind
    subject: Annotated[Identifier, Field(max_length=64)]
    scope: Scope | None
    sha256: Sha256Hex
    created_at: Instant
    expires_at: Instant | None

    def is_valid(self, now: int) -> bool:
        return self.expires_at is None or now < self.expires_at


@dataclass(frozen=True, slots=True)
class _Document:
    __pydantic_config__ = DOCUMENT

    schema: Literal["gpuledger.tokens/1"]
    tokens: Annotated[tuple[Token, ...], Field(max_length=MAX_TOKENS)]


_DOCUMENT: Final = TypeAdapter(_Document)


@dataclass(frozen=True, slots=True)
class Issued:
    """A new token. `secret` is what its owner sends; it stands nowhere else."""

    token: Token
    secret: str


class TokensUnusable(Exception):
    """The file of the tokens cannot be read or written as it is."""


class TokenUnknown(Exception):
    """No token has this id."""


def digest_of(secret: str) -> str:
    """How a token is known, in hex."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def wall_clock() -> int:
    """Microseconds since the epoch. Lives of tokens are told in the time that people have."""
    return time.time_ns() // 1000


# ---- reading ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stamp:
    """Which version of a file lies there: another one has another inode, or at least another of the rest."""

    inode: int
    changed_ns: int
    size: int

    @classmethod
    def of(cls, found: os.stat_result) -> _Stamp:
        return cls(found.st_ino, found.st_ctime_ns, found.st_size)


def read_tokens(path: Path) -> tuple[Token, ...]:
    """The tokens of a file; none where there is none. Raises TokensUnusable."""
    return _read(path)[1]


def _read(path: Path) -> tuple[_Stamp | None, tuple[Token, ...]]:
    try:
        # Not to be held up by a pipe that nobody writes to.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise TokensUnusable(f"{path}: is not a file")
            _check_owner(path, found)
            text = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None, ()
    except OSError as error:
        raise TokensUnusable(f"{path}: cannot be read ({error.strerror})") from None
    if len(text) > MAX_FILE_BYTES:
        raise TokensUnusable(f"{path}: is larger than {MAX_FILE_BYTES} bytes")
    return _Stamp.of(found), _tokens_of(path, text)


def _check_owner(path: Path, found: os.stat_result) -> None:
    """Who can write it can make itself an operator."""
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise TokensUnusable(f"{path}: others can write it: chmod 600 {path}")
    if found.st_uid not in (0, os.geteuid(), path.parent.stat().st_uid):
        raise TokensUnusable(f"{path}: belongs to another user (uid {found.st_uid})")


def _tokens_of(path: Path, text: bytes) -> tuple[Token, ...]:
    try:
        document = _DOCUMENT.validate_json(text)
    except ValidationError as error:
        raise TokensUnusable(f"{path}: {DocumentError(tuple(problems_of(error, _Document, '')))}") from None
    problems = tuple(_broken_rules(document.tokens))
    if problems:
        raise TokensUnusable(f"{path}: {DocumentError(problems)}")
    return document.tokens


def _broken_rules(tokens: Sequence[Token]) -> Iterable[Problem]:
    seen: set[str] = set()
    for index, token in enumerate(tokens):
        for name, value in (("id", token.id), ("sha256", token.sha256)):
            if value in seen:
                yield Problem(at("tokens", index, name), "is there already")
            seen.add(value)
        if (token.scope is not None) != (token.kind is TokenKind.OPERATOR):
            yield Problem(at("tokens", index, "scope"), "belongs to tokens of operators, and to each of them")


class TokenWatch:
    """The tokens of a file, read again when it has changed: one look at it a call, and a read a change.

    While it is broken what was known last counts, and the log says why. A file that is gone holds no tokens.
    """

    def __init__(self, path: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Raises TokensUnusable."""
        self._path = path
        self._monotonic = monotonic
        self._seen, self._tokens = _read(path)
        self._trouble: str | None = None
        self._retry_at = 0.0

    def current(self) -> tuple[Token, ...]:
        try:
            stamp = _stamp_of(self._path)
            if stamp != self._seen or (self._trouble is not None and self._monotonic() >= self._retry_at):
                # Also of one that cannot be used: it is not read again at each request.
                self._seen, self._retry_at = stamp, self._monotonic() + RETRY_SECONDS
                self._seen, self._tokens = _read(self._path)
                self._trouble = None
                _log.info("the tokens were read again", tokens=len(self._tokens))
        except TokensUnusable as error:
            self._complain(str(error))
        return self._tokens

    def _complain(self, trouble: str) -> None:
        if trouble != self._trouble:
            _log.error("the file of the tokens cannot be used: what was read before counts", trouble=trouble)
        self._trouble = trouble


def _stamp_of(path: Path) -> _Stamp | None:
    try:
        return _Stamp.of(path.stat())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TokensUnusable(f"{path}: cannot be looked at ({error.strerror})") from None


# ---- changing ---------------------------------------------------------------------------------------------------


class TokenFile:
    """Changes the tokens of a folder, one process at a time. A reader sees the file before a change or after it."""

    def __init__(self, folder: Path, now: Callable[[], int] = wall_clock) -> None:
        self.path = folder / FILE_NAME
        self._folder = folder
        self._now = now

    def read(self) -> tuple[Token, ...]:
        """Raises TokensUnusable."""
        return read_tokens(self.path)

    def create(self, kind: TokenKind, subject: str, scope: Scope | None, life_seconds: int | None) -> Issued:
        """A further token of a subject. Raises TokensUnusable."""
        with self._changing() as tokens:
            issued = self._issue(kind, subject, scope, life_seconds, tokens)
            self._write((*tokens, issued.token))
        return issued

    def rotate(self, token_id: str, grace_seconds: int, life_seconds: int | None) -> Issued:
        """A new token in the place of another, which ends after the grace. It lives as long as that one was made to.

        Raises TokenUnknown, TokensUnusable.
        """
        with self._changing() as tokens:
            old = _found(tokens, token_id)
            if life_seconds is None and old.expires_at is not None:
                life_seconds = (old.expires_at - old.created_at) // seconds(1)
            issued = self._issue(old.kind, old.subject, old.scope, life_seconds, tokens)
            kept = [token for token in tokens if token is not old]
            end = self._now() + seconds(grace_seconds)
            if grace_seconds > 0:
                kept.append(replace(old, expires_at=end if old.expires_at is None else min(end, old.expires_at)))
            self._write((*kept, issued.token))
        return issued

    def revoke(self, token_id: str) -> Token:
        """It is no token any more. Raises TokenUnknown, TokensUnusable."""
        with self._changing() as tokens:
            old = _found(tokens, token_id)
            self._write(tuple(token for token in tokens if token is not old))
        return old

    def _issue(
        self, kind: TokenKind, subject: str, scope: Scope | None, life_seconds: int | None, others: Sequence[Token]
    ) -> Issued:
        secret = PREFIXES[kind] + secrets.token_urlsafe(_SECRET_BYTES)
        taken = {token.id for token in others}
        token_id = next(name for name in iter(_fresh_id, "") if name not in taken)
        now = self._now()
        expires_at = None if life_seconds is None else now + seconds(life_seconds)
        return Issued(Token(token_id, kind, subject, scope, digest_of(secret), now, expires_at), secret)

    @contextlib.contextmanager
    def _changing(self) -> Generator[tuple[Token, ...]]:
        """What is there, less what expired long ago, while nobody else changes it. The folder itself is the lock."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise TokensUnusable(f"{self._folder}: {error.strerror}") from None
        try:
            _lock(descriptor, self._folder)
            forgotten = self._now() - seconds(EXPIRED_KEPT_SECONDS)
            yield tuple(token for token in read_tokens(self.path) if token.is_valid(forgotten))
        finally:
            os.close(descriptor)

    def _write(self, tokens: tuple[Token, ...]) -> None:
        if len(tokens) > MAX_TOKENS:
            raise TokensUnusable(f"{self.path}: there are {MAX_TOKENS} tokens: revoke some first")
        document = _DOCUMENT.dump_python(_Document(SCHEMA, tokens), mode="json")
        text = orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        _tokens_of(self.path, text)  # what could not be read again (a clock that is before 1970) would lose them all
        draft = self._folder / f".{FILE_NAME}.{secrets.token_hex(8)}"
        try:
            self._write_draft(draft, text)
            draft.replace(self.path)
            _sync_folder(self._folder)
        except OSError as error:
            raise TokensUnusable(f"{self.path}: cannot be written ({error.strerror})") from None
        finally:
            draft.unlink(missing_ok=True)

    def _write_draft(self, draft: Path, text: bytes) -> None:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            if os.geteuid() == 0:
                # The server that reads it need not be root.
                owner = self._folder.stat()
                os.fchown(descriptor, owner.st_uid, owner.st_gid)
            file.write(text)
            file.flush()
            os.fsync(descriptor)


def _fresh_id() -> str:
    return f"tok-{secrets.token_hex(4)}"


def _found(tokens: Iterable[Token], token_id: str) -> Token:
    for token in tokens:
        if token.id == token_id:
            return token
    raise TokenUnknown(token_id)


def _lock(descriptor: int, folder: Path) -> None:
    deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                held = f"another process has been changing tokens for {LOCK_PATIENCE_SECONDS:.0f} seconds"
                raise TokensUnusable(f"{folder}: {held}") from None
            time.sleep(_LOCK_PAUSE_SECONDS)
        else:
            return


def _sync_folder(folder: Path) -> None:
    """So that the change is still there after a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def token_document(token: Token, now: int) -> dict[str, str | bool | None]:
    """What may be shown of a token: everything but its hash."""
    return {
        "id": token.id,
        "kind": token.kind.value,
        "subject": token.subject,
        "scope": None if token.scope is None else token.scope.value,
        "created_at": format_instant(token.created_at),
        "expires_at": None if token.expires_at is None else format_instant(token.expires_at),
        "valid": token.is_valid(now),
    }
