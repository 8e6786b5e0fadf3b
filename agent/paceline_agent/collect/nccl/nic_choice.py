"""Network devices that NCCL may use, from the settings of a process.

NCCL user guide, NCCL_IB_HCA and NCCL_SOCKET_IFNAME: a list of prefixes; a leading `=` means whole
names, a leading `^` all other devices; a device may be followed by `:PORT`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SETTINGS = ("NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME", "NCCL_NET")
_NEVER = ("lo", "docker")  # unless requested, or no other device exists


def allowed(
    settings: Mapping[str, str], rdma: Sequence[str], network: Sequence[str]
) -> tuple[str, Sequence[str]]:
    """Return ("rdma" or "nic", those of the given devices that NCCL may use)."""
    over_sockets = settings.get("NCCL_NET", "").lower() == "socket"
    if rdma and settings.get("NCCL_IB_DISABLE", "0") in ("0", "") and not over_sockets:
        return "rdma", chosen(settings.get("NCCL_IB_HCA", ""), rdma)
    wanted = settings.get("NCCL_SOCKET_IFNAME", "")
    if not wanted:
        wanted = "^" + ",".join(_NEVER)
    return "nic", chosen(wanted, network)


def chosen(wanted: str, names: Sequence[str]) -> list[str]:
    """
    Return the devices that the setting selects.

    >>> chosen("=mlx5_1", ["mlx5_1", "mlx5_10"]), chosen("^mlx5_1", ["mlx5_1", "mlx5_2"])
    (['mlx5_1'], ['mlx5_2'])
    """
    but = wanted.startswith("^")
    whole = "=" in wanted[:2]
    listed = [part.partition(":")[0].strip() for part in wanted.lstrip("^=").split(",")]
    listed = [part for part in listed if part]
    if not listed:
        return list(names)

    def matches(name: str) -> bool:
        return any(name == part if whole else name.startswith(part) for part in listed)

    return [name for name in names if matches(name) != but]
