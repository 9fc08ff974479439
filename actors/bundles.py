"""What an engine asks of the cluster: one placement group."""

from actors.config import EngineConfig

# The router itself mostly waits; its share only has to exist.
ROUTER_CPUS = 0.1
# The name Ray gives a NeuronCore, as its detection counts them.
NEURON_CORES = "neuron_cores"


def bundles(config: EngineConfig) -> list[dict[str, float]]:
    """One engine's placement group: the router in bundle 0, then the target's ranks, then those of
    a dedicated drafter."""
    shard = {"CPU": config.cpus_per_shard, **shard_resources(config)}
    return [{"CPU": ROUTER_CPUS}, *[shard] * config.num_ranks]


def shard_resources(config: EngineConfig) -> dict[str, float]:
    """What a shard takes of its bundle besides CPUs.

    Of `neuron_cores` Ray gives whole ones, to nobody else, and names them to the shard's process in
    NEURON_RT_VISIBLE_CORES.
    """
    if config.neuron_cores_per_shard is None:
        return {}
    return {NEURON_CORES: config.neuron_cores_per_shard}
