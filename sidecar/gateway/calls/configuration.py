"""The configuration that all engines of a fleet share, and where they differ. No I/O.

vLLM's ``/server_info`` has what it serves with in ``vllm_config``. Its other sections list the process and
its machine: no two engines agree on those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

CONFIG: Final = "vllm_config"
# Of one process or one machine: addresses, seeds, folders, times, and how much memory was free.
_OWN: Final = frozenset(
    """
    instance_id host port seed endpoint replay_endpoint master_addr master_port data_parallel_master_ip
    data_parallel_master_port data_parallel_rpc_port _data_parallel_master_port_list _coord_store_port
    cache_dir local_cache_dir compilation_time encoder_compilation_time
    num_gpu_blocks num_cpu_blocks kv_cache_size_tokens kv_cache_max_concurrency
    """.split()
)


def difference(one: Any, other: Any, where: str = CONFIG) -> str | None:
    """Return where two configurations differ, and both values; None: nowhere that counts."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other} - _OWN):
            found = difference(one.get(key), other.get(key), f"{where}.{key}")
            if found is not None:
                return found
        return None
    return None if one == other else f"{where}: {str(one)[:100]} and {str(other)[:100]}"


def common(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the first engine's configuration, and of its other sections what all engines have."""
    first, *others = told
    shared = {name: _shared(section, [one.get(name) for one in others]) for name, section in first.items()}
    return shared | {CONFIG: first.get(CONFIG)}


def _shared(one: Any, others: Sequence[Any]) -> Any:
    if not isinstance(one, dict):
        return one if all(other == one for other in others) else None
    dicts = [other if isinstance(other, dict) else {} for other in others]
    return {key: value for key, value in one.items() if all(other.get(key) == value for other in dicts)}
