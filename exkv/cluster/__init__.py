"""One model over several hosts, on torch.distributed: ``Cluster`` gathers the hosts, and
``ClusterModel`` lies on them.

Every process holds the same model and the same caches, and makes the same calls with the same code;
only its own units and their layers of a cache have memory. Start with ``model.py``, which says what
the driver sends; ``host.py`` is the other hosts' loop, ``wire.py`` what goes between them.
"""

from .cluster import Cluster
from .errors import ClusterError, WireError
from .model import ClusterModel

__all__ = ["Cluster", "ClusterError", "ClusterModel", "WireError"]
