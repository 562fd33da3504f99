"""Where a prompt's beginning is, as far as a gateway sent it there, and which beginnings count."""

from __future__ import annotations

from collections import OrderedDict
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.gateway.prefix import BLOCK_BYTES, Prefixes, chain
from lora_fs.sidecar.gateway.routing import Router, Ticket


@given(st.binary(max_size=600), st.binary(max_size=600))
def test_nothing_of_another_revision_matches(prompt: bytes, other: bytes) -> None:
    """The same prompt under another adapter's digest shares no block."""
    assert not set(chain("digest-1", prompt)) & set(chain("digest-2", prompt))
    same = 0
    while same < min(len(prompt), len(other)) and prompt[same] == other[same]:
        same += 1
    shared = set(chain("d", prompt)) & set(chain("d", other))
    assert len(shared) == same // BLOCK_BYTES


def test_a_common_beginning_identifies_no_prompt() -> None:
    """A block with several successors, and one that all replicas have, are not counted."""
    prefixes, system = Prefixes(), b"s" * BLOCK_BYTES
    one, two = chain("d", system + b"1" * 2 * BLOCK_BYTES), chain("d", system + b"2" * 2 * BLOCK_BYTES)
    prefixes.sent(one, "r0")
    prefixes.sent(two, "r1")
    assert prefixes.found(one, {"r0", "r1", "r2"}) == {"r0": 2}
    assert prefixes.found(chain("d", system + b"3" * BLOCK_BYTES), {"r0", "r1", "r2"}) == {}
    prefixes.sent(one, "r1")
    assert prefixes.found(one, {"r0", "r1"}) == {}


def test_only_whole_blocks_of_the_first_8_kib_count() -> None:
    """What lies behind them identifies no prompt."""
    blocks = {0: 0, 63: 0, 64: 1, 127: 1, 128: 2, 8191: 127, 8192: 128, 100_000: 128}
    assert {size: len(chain("d", bytes(size))) for size in blocks} == blocks


def test_a_beginning_of_several_prompts_counts_for_none_however_long_it_is() -> None:
    """Nor for a prompt that is such a beginning and nothing more. What a conversation adds to it counts."""
    prefixes, system = Prefixes(), b"s" * 5 * BLOCK_BYTES
    for number in range(2):
        prefixes.sent(chain("d", system + b"%d" % number * BLOCK_BYTES), "r0")
    assert prefixes.found(chain("d", system), {"r0", "r1"}) == {}
    assert prefixes.found(chain("d", system + b"2" * BLOCK_BYTES), {"r0", "r1"}) == {}
    assert prefixes.found(chain("d", system + b"0" * BLOCK_BYTES + b"more" * BLOCK_BYTES), {"r0", "r1"}) == {
        "r0": 1
    }


def test_requests_with_one_system_prompt_use_all_replicas() -> None:
    """Eight requests at once, which are alike for 640 bytes, are two at each of four replicas."""
    router, system = Router(lambda: 100.0), b"s" * 10 * BLOCK_BYTES
    for number in range(4):
        router.report(f"r{number}", [], 8, 100.0)
    for number in range(8):
        router.ask(Ticket(None, lambda _: None, chain("", system + b"%d" % number * BLOCK_BYTES)))
    assert [peer.in_flight for peer in router.peers] == [2] * 4


def test_to_forget_a_replica_looks_at_no_block() -> None:
    """There are 131,072 of them, and every stream waits meanwhile."""
    prefixes, prompt = Prefixes(), chain("d", b"p" * 2 * BLOCK_BYTES)
    prefixes.sent(prompt, "r0")
    blocks, prefixes._blocks = prefixes._blocks, Mock(spec=OrderedDict)
    prefixes.forget("r0")
    assert not prefixes._blocks.mock_calls
    prefixes._blocks = blocks
    assert prefixes.found(prompt, {"r0", "r1"}) == {}
    prefixes.sent(prompt[:1], "r0")
    assert prefixes.found(prompt, {"r0", "r1"}) == {"r0": 1}


def test_a_prompt_that_everybody_sends_remembers_no_replica_that_is_gone() -> None:
    """However many replicas come and go."""
    prefixes, prompt = Prefixes(), chain("d", b"p" * BLOCK_BYTES)
    for number in range(100):
        prefixes.sent(prompt, f"r{number}")
        if number >= 2:
            prefixes.forget(f"r{number - 2}")
    assert prefixes.found(prompt, {f"r{number}" for number in range(100)}) == {"r98": 1, "r99": 1}
    (block,) = prefixes._blocks.values()
    assert len(block.lives) <= 3


def test_blocks_behind_a_gap_do_not_count() -> None:
    """Nor does it matter there how many prompts go on."""
    prefixes, begun = Prefixes(), chain("d", b"p" * 2 * BLOCK_BYTES)
    for end in (b"1", b"2"):
        prefixes.sent(chain("d", b"p" * 2 * BLOCK_BYTES + end * BLOCK_BYTES), "r1")
    prefixes.sent(begun[:1], "r0")
    assert prefixes.found(begun, {"r0", "r2"}) == {"r0": 1}


def test_a_prompt_that_is_sent_again_is_new() -> None:
    """The one that was not sent for the longest time is forgotten."""
    prefixes = Prefixes(kept=2)
    one, two, three = (chain("d", b"%d" % number * BLOCK_BYTES) for number in range(3))
    for prompt in (one, two, one, three):
        prefixes.sent(prompt, "r0")
    assert [bool(prefixes.found(prompt, {"r0", "r1"})) for prompt in (one, two, three)] == [True, False, True]


def test_the_memory_of_prompts_is_bounded() -> None:
    """Old blocks are forgotten first."""
    prefixes = Prefixes(kept=100)
    for number in range(1000):
        prefixes.sent(chain("d", number.to_bytes(4, "big") * BLOCK_BYTES), "r0")
    assert len(prefixes) == 100
    assert prefixes.found(chain("d", (999).to_bytes(4, "big") * BLOCK_BYTES), {"r0", "r1"}) == {"r0": 4}
    prefixes.forget("r0")
    assert prefixes.found(chain("d", (999).to_bytes(4, "big") * BLOCK_BYTES), {"r0", "r1"}) == {}
