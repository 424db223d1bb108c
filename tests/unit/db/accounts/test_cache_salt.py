"""The salts of prefix caches."""

from pydantic import SecretStr

from db.accounts.principal import CACHE_SALT_BYTES, cache_salt_of

PEPPER = SecretStr("p" * 32)


def test_a_salt_is_its_tenants_and_cannot_be_guessed_without_the_pepper() -> None:
    salt = cache_salt_of("a", PEPPER)
    assert salt == cache_salt_of("a", SecretStr(PEPPER.get_secret_value()))  # at every gateway, after every restart
    assert len(bytes.fromhex(salt)) == CACHE_SALT_BYTES
    assert len({salt, cache_salt_of("b", PEPPER), cache_salt_of("a", SecretStr("q" * 32))}) == 3
