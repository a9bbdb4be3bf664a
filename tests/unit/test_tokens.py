"""The file of tokens: hashes alone, changed by one process at a time, and taken up by who watches it."""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpuledger.adapters import tokens as module
from gpuledger.adapters.http.auth import Client, Clients, Operators
from gpuledger.adapters.tokens import (
    EXPIRED_KEPT_SECONDS,
    FILE_NAME,
    Issued,
    Scope,
    Token,
    TokenFile,
    TokenKind,
    TokensUnusable,
    TokenUnknown,
    TokenWatch,
    digest_of,
    read_tokens,
)
from gpuledger.domain.policy import Priority
from gpuledger.domain.units import seconds

NOW = 1_796_000_000_000_000
DAY = 86_400


class Wall:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> int:
        return self.now

    def pass_(self, duration_seconds: int) -> None:
        self.now += seconds(duration_seconds)


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def file(tmp_path: Path, wall: Wall) -> TokenFile:
    return TokenFile(tmp_path / "state", wall)


def client_token(file: TokenFile, name: str = "app", life_seconds: int | None = None) -> Issued:
    return file.create(TokenKind.CLIENT, name, None, life_seconds)


def operator_token(file: TokenFile, name: str = "ann", scope: Scope = Scope.OPERATE) -> Issued:
    return file.create(TokenKind.OPERATOR, name, scope, None)


class TestFile:
    def test_it_has_hashes_and_no_token(self, file: TokenFile) -> None:
        issued = [client_token(file), operator_token(file)]
        text = file.path.read_text()
        assert all(one.secret not in text and digest_of(one.secret) in text for one in issued)
        assert [one.secret[:4] for one in issued] == ["glc_", "glo_"]
        assert all(len(one.secret) >= 4 + 43 for one in issued)  # 256 bits in base64
        assert read_tokens(file.path) == tuple(one.token for one in issued)

    def test_only_its_owner_can_read_it(self, file: TokenFile) -> None:
        client_token(file)
        assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
        assert [path.name for path in file.path.parent.iterdir()] == [FILE_NAME]

    def test_without_a_file_there_is_no_token(self, file: TokenFile) -> None:
        assert file.read() == ()

    def test_a_token_ends(self, file: TokenFile, wall: Wall) -> None:
        token = client_token(file, life_seconds=DAY).token
        assert token.expires_at == NOW + seconds(DAY)
        assert token.is_valid(NOW + seconds(DAY) - 1)
        assert not token.is_valid(NOW + seconds(DAY))

    def test_one_that_is_revoked_is_no_more(self, file: TokenFile) -> None:
        one, other = client_token(file).token, client_token(file).token
        assert file.revoke(one.id) == one
        assert file.read() == (other,)
        with pytest.raises(TokenUnknown):
            file.revoke(one.id)

    def test_one_that_is_rotated_is_another(self, file: TokenFile) -> None:
        old = operator_token(file, scope=Scope.AUDIT)
        new = file.rotate(old.token.id, 0, None)
        assert new.secret != old.secret
        assert file.read() == (new.token,)
        assert (new.token.kind, new.token.subject, new.token.scope) == (TokenKind.OPERATOR, "ann", Scope.AUDIT)

    def test_the_old_one_may_work_on_for_a_while(self, file: TokenFile, wall: Wall) -> None:
        old = client_token(file).token
        new = file.rotate(old.id, 600, None).token
        kept, other = file.read()
        assert (kept.id, kept.expires_at) == (old.id, NOW + seconds(600))
        assert (other, other.expires_at) == (new, None)

    def test_but_no_longer_than_it_would_have(self, file: TokenFile) -> None:
        old = client_token(file, life_seconds=60).token
        file.rotate(old.id, 600, None)
        assert file.read()[0].expires_at == old.expires_at

    def test_a_new_one_lives_as_long_as_the_old_one_was_made_to(self, file: TokenFile, wall: Wall) -> None:
        old = client_token(file, life_seconds=10 * DAY).token
        wall.pass_(9 * DAY)
        assert file.rotate(old.id, 0, None).token.expires_at == wall.now + seconds(10 * DAY)
        (present,) = file.read()
        assert file.rotate(present.id, 0, DAY).token.expires_at == wall.now + seconds(DAY)

    def test_what_expired_long_ago_is_forgotten(self, file: TokenFile, wall: Wall) -> None:
        old = client_token(file, life_seconds=DAY).token
        wall.pass_(2 * DAY)
        recent = client_token(file).token
        assert file.read() == (old, recent)
        wall.pass_(EXPIRED_KEPT_SECONDS)
        newest = client_token(file).token
        assert file.read() == (recent, newest)

    def test_there_are_only_so_many(self, file: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MAX_TOKENS", 2)
        client_token(file)
        client_token(file)
        with pytest.raises(TokensUnusable, match="revoke some first"):
            client_token(file)
        assert len(file.read()) == 2

    def test_processes_that_change_it_together_lose_nothing(self, file: TokenFile) -> None:
        program = (
            "import sys; from pathlib import Path; from gpuledger.adapters.tokens import *\n"
            "for n in range(5): TokenFile(Path(sys.argv[1])).create(TokenKind.CLIENT, f'{sys.argv[2]}-{n}', None, None)"
        )
        command = (sys.executable, "-c", program, str(file.path.parent))
        with ThreadPoolExecutor(3) as pool:
            running = [pool.submit(subprocess.run, [*command, name]) for name in "abc"]
        assert [one.result().returncode for one in running] == [0, 0, 0]
        assert {token.subject for token in file.read()} == {f"{name}-{n}" for name in "abc" for n in range(5)}

    def test_one_who_holds_it_for_ever_is_not_waited_for(
        self, file: TokenFile, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client_token(file)
        monkeypatch.setattr(module, "LOCK_PATIENCE_SECONDS", 0.05)
        holder = os.open(file.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(holder, fcntl.LOCK_EX)
            with pytest.raises(TokensUnusable, match="another process"):
                client_token(file)
        finally:
            os.close(holder)
        client_token(file)

    def test_a_change_that_fails_leaves_it_as_it_was(self, file: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
        before = (client_token(file).token,)

        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", full)
            with pytest.raises(TokensUnusable, match="No space left"):
                client_token(file)
        assert file.read() == before
        assert [path.name for path in file.path.parent.iterdir()] == [FILE_NAME]


class TestBrokenFiles:
    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("{", "EOF while parsing"),
            ("[]", "must be an object"),
            ('{"schema": "gpuledger.tokens/2", "tokens": []}', "schema"),
            ('{"schema": "gpuledger.tokens/1", "tokens": [], "more": 1}', "more: unknown key"),
            ('{"schema": "gpuledger.tokens/1", "tokens": [{"id": "tok-1"}]}', "tokens[0].id"),
        ],
    )
    def test_it_is_told_what_is_wrong(self, file: TokenFile, text: str, told: str) -> None:
        file.path.parent.mkdir()
        file.path.write_text(text)
        with pytest.raises(TokensUnusable) as error:
            file.read()
        assert told in str(error.value)
        assert str(file.path) in str(error.value)

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"scope": "read"}, "tokens[1].scope"),
            ({"kind": "operator"}, "tokens[1].scope"),
            ({"id": None}, "tokens[1].id: is there already"),
            ({"sha256": None}, "tokens[1].sha256: is there already"),
        ],
    )
    def test_tokens_that_do_not_fit(self, file: TokenFile, changes: dict[str, str | None], told: str) -> None:
        client_token(file)
        document = json.loads(file.path.read_text())
        first = document["tokens"][0]
        changed = {key: first[key] if value is None else value for key, value in changes.items()}
        document["tokens"].append({**first, "id": "tok-00000000", "sha256": "ab" * 32, **changed})
        file.path.write_text(json.dumps(document))
        with pytest.raises(TokensUnusable) as error:
            file.read()
        assert told in str(error.value)

    def test_one_that_others_can_write(self, file: TokenFile) -> None:
        client_token(file)
        file.path.chmod(0o620)
        with pytest.raises(TokensUnusable, match="chmod 600"):
            file.read()

    def test_one_that_is_far_too_large(self, file: TokenFile) -> None:
        file.path.parent.mkdir()
        file.path.write_bytes(b" " * (module.MAX_FILE_BYTES + 1))
        with pytest.raises(TokensUnusable, match="larger than"):
            file.read()

    def test_a_pipe_in_its_place_holds_nobody_up(self, file: TokenFile) -> None:
        client_token(file)
        watch = TokenWatch(file.path)
        file.path.unlink()
        os.mkfifo(file.path, 0o600)
        with ThreadPoolExecutor(1) as pool:
            assert len(pool.submit(watch.current).result(30)) == 1
            with pytest.raises(TokensUnusable, match="is not a file"):
                pool.submit(file.read).result(30)

    def test_a_clock_before_its_beginning_breaks_none(self, file: TokenFile, wall: Wall) -> None:
        """Some machines start with one that is off by decades, beyond what an instant can be."""
        kept = client_token(file)
        wall.now = -seconds(DAY)
        with pytest.raises(TokensUnusable, match="must be an instant"):
            client_token(file, "late")
        assert file.read() == (kept.token,)

    def test_a_change_does_not_begin_with_one(self, file: TokenFile) -> None:
        file.path.parent.mkdir()
        file.path.write_text("{")
        with pytest.raises(TokensUnusable):
            client_token(file)
        assert file.path.read_text() == "{"


class TestWatch:
    def test_changes_are_taken_up_at_the_next_look(self, file: TokenFile) -> None:
        watch = TokenWatch(file.path)
        assert watch.current() == ()
        one = client_token(file).token
        assert watch.current() == (one,)
        two = client_token(file).token
        assert watch.current() == (one, two)
        file.revoke(one.id)
        assert watch.current() == (two,)

    def test_a_file_that_did_not_change_is_not_read(self, file: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
        client_token(file)
        watch = TokenWatch(file.path)

        def read(_: Path) -> None:
            raise AssertionError("it is read again")

        monkeypatch.setattr(module, "_read", read)
        assert len(watch.current()) == 1

    def test_while_it_is_broken_the_last_good_one_counts(self, file: TokenFile) -> None:
        one = client_token(file).token
        clock = [100.0]
        watch = TokenWatch(file.path, lambda: clock[0])
        good = file.path.read_bytes()
        file.path.write_text("{")
        with capture_logs() as log:
            assert [watch.current() for _ in range(3)] == [(one,)] * 3
            clock[0] += 10
            assert watch.current() == (one,)
        assert [entry["log_level"] for entry in log] == ["error"]
        file.path.write_bytes(good)
        file.path.chmod(0o600)
        two = client_token(file).token
        assert watch.current() == (one, two)

    def test_one_that_can_be_read_again_is_read_though_nobody_changed_it(
        self, file: TokenFile, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        watch = TokenWatch(file.path, clock := Ticking())
        one = client_token(file).token
        with monkeypatch.context() as broken:
            broken.setattr(module, "_check_owner", refuse)
            assert watch.current() == ()
        clock.now += 0.5
        assert watch.current() == ()
        clock.now += 1.0
        assert watch.current() == (one,)

    def test_a_file_that_is_gone_holds_no_tokens(self, file: TokenFile) -> None:
        client_token(file)
        watch = TokenWatch(file.path)
        file.path.unlink()
        assert watch.current() == ()

    def test_one_that_is_broken_at_the_start_is_told(self, file: TokenFile) -> None:
        file.path.parent.mkdir()
        file.path.write_text("{")
        with pytest.raises(TokensUnusable):
            TokenWatch(file.path)


class Ticking:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def refuse(path: Path, found: os.stat_result) -> None:
    raise TokensUnusable(f"{path}: not now")


class TestAuthorization:
    def clients(self, tokens: list[Token], wall: Wall) -> Clients:
        known = [
            Client("app", digest_of("of-the-file"), Priority.INTERACTIVE, False, None),
            Client("batch", None, Priority.BACKGROUND, False, frozenset({"emb@1"})),
        ]
        return Clients(known, lambda: tokens, wall)

    def test_tokens_of_the_configuration_and_of_the_file(self, file: TokenFile, wall: Wall) -> None:
        issued = [client_token(file, name) for name in ("app", "batch", "batch")]
        clients = self.clients([one.token for one in issued], wall)
        secrets = ["of-the-file", *(one.secret for one in issued)]
        assert [name_of(clients, secret) for secret in secrets] == ["app", "app", "batch", "batch"]
        batch = clients.by_authorization(f"Bearer {issued[1].secret}")
        assert batch is not None
        assert (batch.priority, batch.may_ask_for("chat@1")) == (Priority.BACKGROUND, False)

    def test_a_token_that_has_ended(self, file: TokenFile, wall: Wall) -> None:
        issued = client_token(file, life_seconds=DAY)
        clients = self.clients([issued.token], wall)
        assert name_of(clients, issued.secret) == "app"
        wall.pass_(DAY)
        assert name_of(clients, issued.secret) is None

    def test_a_token_of_a_client_that_is_not_declared(self, file: TokenFile, wall: Wall) -> None:
        issued = client_token(file, "gone")
        assert name_of(self.clients([issued.token], wall), issued.secret) is None

    def test_a_token_is_for_one_door(self, file: TokenFile, wall: Wall) -> None:
        client, operator = client_token(file), operator_token(file, "app")
        tokens = [client.token, operator.token]
        operators = Operators(lambda: tokens, wall)
        assert name_of(self.clients(tokens, wall), operator.secret) is None
        assert operators.by_authorization(f"Bearer {client.secret}") is None
        found = operators.by_authorization(f"bearer {operator.secret}")
        assert found is not None
        assert (found.name, found.scope, found.token_id) == ("app", Scope.OPERATE, operator.token.id)
        assert operators.by_authorization(f"Basic {operator.secret}") is None
        assert operators.by_authorization(None) is None

    def test_every_token_is_compared_with(self, file: TokenFile, wall: Wall, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whichever matches, and where none does: how long it takes tells nothing."""
        compared: list[str] = []

        def compare(known: str, given: str) -> bool:
            compared.append(known)
            return known == given

        monkeypatch.setattr(hmac, "compare_digest", compare)
        issued = [client_token(file), client_token(file, "batch")]
        clients = self.clients([one.token for one in issued], wall)
        for secret in ("of-the-file", issued[0].secret, "nobody's"):
            compared.clear()
            name_of(clients, secret)
            assert len(compared) == 3

    @pytest.mark.parametrize(
        ("scope", "allowed"),
        [
            (Scope.READ, {Scope.READ}),
            (Scope.AUDIT, {Scope.READ, Scope.AUDIT}),
            (Scope.OPERATE, {Scope.READ, Scope.OPERATE}),
        ],
    )
    def test_what_a_scope_allows(self, scope: Scope, allowed: set[Scope]) -> None:
        assert {needed for needed in Scope if scope.allows(needed)} == allowed


def name_of(clients: Clients, secret: str) -> str | None:
    client = clients.by_authorization(f"Bearer {secret}")
    return None if client is None else client.client_id
