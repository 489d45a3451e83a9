"""One model over several hosts, on torch.distributed: ``Cluster`` gathers the hosts,
``ClusterModel`` is distributed over them.

Every process has the same model and caches, and makes the same calls with the same code; only its
own units and their cache layers have memory. Start with ``model.py``, which sends the driver's
commands; ``host.py`` is the other hosts' loop, ``wire.py`` the transport between them.
"""

from .cluster import Cluster
from .errors import ClusterError, WireError
from .model import ClusterModel

__all__ = ["Cluster", "ClusterError", "ClusterModel", "WireError"]
