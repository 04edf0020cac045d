"""A registry of many living members, each with some load, used to time one placement."""

import random
from typing import Any

from benchmarks.front_door.addresses import HOST
from benchmarks.front_door.instances import describe
from scheduler.grants import Placer
from scheduler.instances import Instance
from scheduler.limits import ControlLimits
from scheduler.load.loads import PromptFacts
from scheduler.load.prefixes import DIGEST_TOKENS
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.registry import Registry
from wire.load import LoadSnapshot
from wire.types import Role


def registry_of(num_members: int, rng: random.Random) -> Registry:
    """Return a registry whose members, half of them prefill instances, are all living. Needs a running loop."""
    roles = [Role.PREFILL if index % 2 else Role.DECODE for index in range(num_members)]
    expected = [ExpectedInstance(at, f"{role}-{at}", role, HOST, HOST, ()) for at, role in enumerate(roles)]
    unused: Any = None
    limits = ControlLimits()
    registry = Registry(expected, unused, table_digest="", scheduler_id="", epoch=1, limits=limits, rng=rng)
    for member in registry.members:
        entry, description = member.expected, describe(member.expected.index, member.role, 1)
        blocks, running = description.num_blocks, rng.randrange(64)
        used = rng.randrange(blocks // 2)
        load = LoadSnapshot(blocks_total=blocks, blocks_used=used, running=running, prefix_tokens_sought=1)
        member.instance = Instance(
            entry.index, entry.name, description, member.role, unused, load, limits, registry.changed, registry.changed,
            unused,
        )  # fmt: skip
        registry.kv_pairs.add(entry, description)
    return registry


def place_and_release(placer: Placer, rng: random.Random) -> None:
    """Place one prompt that no member has cached, from the members' loads as they are now, and release it."""
    length = rng.randrange(64, 4000)
    chain = tuple(rng.randbytes(16) for _ in range(length // DIGEST_TOKENS))
    grant = placer.try_place("p", PromptFacts(length, rng.randrange(2, 1000), chain=chain))
    assert grant is not None
    grant.release()
