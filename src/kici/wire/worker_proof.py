"""How a worker and a coordinator show each other that they know the same credential, without telling it.

The key is the hash of the credential, which is all that the store keeps.  What is proved names the side, so that
neither can be answered with its own words.
"""

import hashlib
import hmac
from typing import Final

WORKER: Final = "worker"
COORDINATOR: Final = "coordinator"


def hash_of(secret: str) -> str:
    """What is kept of a credential or a join token: SHA-256, hex."""
    return hashlib.sha256(secret.encode()).hexdigest()


def proof_of(credential_hash: str, *, side: str, nonce: str, who: str) -> str:
    """`nonce`: the other side's; `who`: the id of the side that proves."""
    text = f"{side}:{nonce}:{who}"
    return hmac.new(credential_hash.encode(), text.encode(), hashlib.sha256).hexdigest()


def is_proof(given: str, credential_hash: str, *, side: str, nonce: str, who: str) -> bool:
    return hmac.compare_digest(given.encode(), proof_of(credential_hash, side=side, nonce=nonce, who=who).encode())
